"""Where the k-th largest magnitude probably lies, for less than it costs to sort.

An estimator is a function of (magnitudes, k, state). These are the published closed forms and
searches; `Threshold` corrects, caps and remembers for all of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import Tensor

from thinwire.selectors.threshold import Memo


@dataclass(frozen=True)
class Constant:
    """A fixed threshold in units of the gradient (Strom 2015)."""

    value: float

    def __post_init__(self) -> None:
        if not isinstance(self.value, int | float) or not 0 <= self.value < math.inf:
            raise ValueError(f"a threshold must be a number, 0 or more, got {self.value!r}")

    def __call__(self, size: Tensor, k: int, state: Memo) -> float:
        return self.value


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """DGC: the k-th largest of a sample, scaled down with it.

    Every stride-th entry from a start that moves; at least two expected hits, so that a small
    layer is its own sample. Lin et al. 2018 (arXiv 1712.01887), section 3.
    """

    fraction: float = 0.01

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise ValueError(f"sample must be a fraction in (0, 1], got {self.fraction!r}")

    def __call__(self, size: Tensor, k: int, state: Memo) -> float:
        n = size.numel()
        wanted = max(self.fraction * n, 2 * n / k)
        stride = max(1, int(n / wanted))
        stride -= stride > 1 and stride % 2 == 0  # odd: not in step with rows of even length
        draws = int(state.get("draws", 0))
        state["draws"] = draws + 1
        sample = size[draws * 7919 % stride :: stride]
        hits = min(sample.numel(), max(1, math.ceil(k / n * sample.numel())))
        return float(sample.topk(hits).values[-1])


def gaussian(size: Tensor, k: int, state: Memo) -> float:
    """GaussianK: z * sigma with z = Phi^-1(1 - k / 2n), two-sided, the mean taken as zero.

    Shi et al. 2019 (arXiv 1911.08772).
    """
    n = size.numel()
    quantile = NormalDist().inv_cdf(1 - k / (2 * n)) if k < n else 0.0
    largest = float(size.max())
    if largest == 0:
        return 0.0
    return quantile * largest * float((size / largest).square().mean().sqrt())


@dataclass(frozen=True, kw_only=True)
class Bisect:
    """RedSync: m + r (M - m) between the mean m and the maximum M, r found by bisection.

    Accepts k to 2k entries; ends when r is known to `epsilon`. Fang et al. 2019 (arXiv 1808.04357).
    """

    epsilon: float = 1e-3

    def __post_init__(self) -> None:
        if not 0 < self.epsilon < 1:
            raise ValueError(f"epsilon must be in (0, 1), got {self.epsilon!r}; 0.001 is usual")

    def __call__(self, size: Tensor, k: int, state: Memo) -> float:
        mean, largest = _mean_and_largest(size)
        low, high = 0.0, 1.0
        while high - low > self.epsilon:
            middle = (low + high) / 2
            theta = mean + middle * (largest - mean)
            count = int((size >= theta).sum())
            if k <= count <= 2 * k:
                return theta
            low, high = (middle, high) if count > 2 * k else (low, middle)
        return mean + low * (largest - mean)


def trimmed(size: Tensor, k: int, state: Memo) -> float:
    """RedSync's trimmed form: r = 0.8, 0.6, ... until at least k entries lie above; never below 0.

    The caller takes the k largest of those. Fang et al. 2019 (arXiv 1808.04357).
    """
    mean, largest = _mean_and_largest(size)
    for r in (0.8, 0.6, 0.4, 0.2, 0.0):
        theta = mean + r * (largest - mean)
        if int((size >= theta).sum()) >= k:
            return theta
    return 0.0


def _mean_and_largest(size: Tensor) -> tuple[float, float]:
    largest = float(size.max())
    if largest == 0:
        return 0.0, 0.0
    return largest * float((size / largest).mean(dtype=torch.float64)), largest


def histogram(size: Tensor, k: int, state: Memo) -> float:
    """The k-th largest to 24 bits, by counting: no sorting, two passes.

    Floats that are not negative order like their bits: count the upper 12, then the next 12 of
    those that share the bin of the k-th.
    """
    bits = size.to(torch.float32).view(torch.int32)
    upper, above = _bin_of(bits >> 20, k)
    lower, _ = _bin_of((bits[bits >> 20 == upper] >> 8) & 0xFFF, k - above)
    return float(torch.tensor((upper << 20) | (lower << 8), dtype=torch.int32).view(torch.float32))


def _bin_of(bins: Tensor, k: int) -> tuple[int, int]:
    """The bin in which the k-th largest is, and how many are in higher ones."""
    reached = torch.bincount(bins, minlength=4096).flip(0).cumsum(0)
    place = int(torch.searchsorted(reached, k))
    return 4095 - place, int(reached[place - 1]) if place else 0
