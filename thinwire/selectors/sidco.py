"""SIDCo: a threshold from a distribution fitted to the magnitudes, in several stages.

With mean mu and variance s2 of the magnitudes, the share delta lies above

    exponential          eta = -mu ln(delta)
    gamma                s = ln mu - mean ln|x|, alpha = (3 - s + sqrt((s - 3)^2 + 24 s)) / (12 s),
                         eta = -(mu / alpha) (ln(delta) + ln Gamma(alpha)), for small delta
    generalised Pareto   kappa = (mu^2 / s2 - 1) / 2, sigma = mu (mu^2 / s2 + 1) / 2,
                         eta = sigma (1 - delta^kappa) / kappa

One stage fits everything. With M stages the first takes a quarter; each of the others fits what is
left beyond the last threshold, shifted to zero, and takes (4 density)^(1 / (M - 1)) of it.
Abdelmoniem et al., MLSys 2021 (arXiv 2101.10761).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.schedule import checked_flag, checked_whole
from thinwire.selectors.threshold import Memo

FIRST = 0.25  # what the first of several stages lets through
PATIENCE = 5  # calls between two looks at the number of stages
TOLERANCE = 0.2  # of the density asked for

Fit = Callable[[Tensor, float], float]  # magnitudes, share -> threshold


def exponential(size: Tensor, share: float) -> float:
    return -float(size.mean()) * math.log(share)


def gamma(size: Tensor, share: float) -> float:
    mean = float(size.mean())
    tiny = torch.finfo(size.dtype).smallest_normal
    s = math.log(mean) - float(size.clamp_min(tiny).log().mean())
    if s <= 0:  # all alike
        return mean
    alpha = (3 - s + math.sqrt((s - 3) ** 2 + 24 * s)) / (12 * s)
    return -mean / alpha * (math.log(share) + math.lgamma(alpha))


def pareto(size: Tensor, share: float) -> float:
    mean, variance = float(size.mean()), float(size.var(correction=0))
    if variance == 0:
        return mean
    kappa = 0.5 * (mean**2 / variance - 1)
    sigma = 0.5 * mean * (mean**2 / variance + 1)
    if abs(kappa) < 1e-4:  # the exponential, where the formula is 0 / 0
        return -mean * math.log(share)
    return float(sigma * (1 - share**kappa) / kappa)


FITS: dict[str, Fit] = {"exponential": exponential, "gamma": gamma, "pareto": pareto}


@dataclass(frozen=True, kw_only=True)
class Sidco:
    """A fit, and how many stages; with `adapt` the number follows what the estimates achieve."""

    fit: str = "pareto"
    stages: int = 2
    adapt: bool = True

    def __post_init__(self) -> None:
        checked_flag("adapt", self.adapt)
        if self.fit not in FITS:
            raise ValueError(f"fit must be one of {', '.join(FITS)}, got {self.fit!r}")
        checked_whole("stages", self.stages, 1, "a number of stages; 2 is usual")

    def __call__(self, size: Tensor, k: int, state: Memo) -> float:
        stages = self._stages(size.numel(), k, state) if self.adapt else self.stages
        return self.threshold(size, k / size.numel(), stages)

    def threshold(self, size: Tensor, density: float, stages: int) -> float:
        """The closed form: what lies above it should be this share of all."""
        largest = float(size.max())
        if largest == 0:
            return 0.0
        rest, total = size / largest, 0.0  # neither tiny nor huge numbers lose their variance
        for number, share in enumerate(_shares(density, stages)):
            # After the first cut every tail is a Pareto tail, unless exponentials were asked for.
            fit = FITS[self.fit] if number == 0 or self.fit == "exponential" else pareto
            step = fit(rest, share)
            total += step
            rest = rest[rest >= step] - step  # what lies beyond, seen from there
            if rest.numel() < 2 or not bool(rest.any()):
                break
        return total * largest

    def _stages(self, n: int, k: int, state: Memo) -> int:
        """The number of stages, looked at every few calls: a neighbour that did better, or that
        was not tried yet, is taken if this one is off by more than the tolerance.

        The published rule turns round when the error has grown, and so walks to and fro; what was
        seen of each number is remembered here instead, and slowly forgotten.
        """
        if state.get("k_stages") != k:
            state.update(k_stages=k, seen={}, ratios=[])
        stages, ratios = int(state.get("stages", self.stages)), list(state["ratios"])
        if "found" in state and state.get("asked") == k:
            ratios.append(float(state["found"]))
        if len(ratios) == PATIENCE:
            off = abs(sum(ratios) / PATIENCE - 1)
            seen = {m: 0.9 * other for m, other in state["seen"].items()} | {stages: off}
            if off > TOLERANCE:
                most = max(1, math.ceil(math.log2(n / k)))
                near = [m for m in (stages, stages + 1, stages - 1) if 1 <= m <= most]
                stages = min(near, key=lambda m: seen.get(m, 0.0))
            state["seen"], ratios = seen, []
        state.update(stages=stages, ratios=ratios, asked=k)
        return stages


def _shares(density: float, stages: int) -> list[float]:
    if stages == 1 or density >= FIRST:
        return [density]
    return [FIRST] + [(density / FIRST) ** (1 / (stages - 1))] * (stages - 1)
