"""Entries above a threshold: one selector, and the estimators of `estimators.py` and `sidco.py`.

    1. estimate a threshold, or reuse the last one;
    2. count what lies above it;
    3. if the count is not near k, correct the threshold in a bounded number of passes;
    4. keep what lies above: of more than the capacity the largest, the rest stays in the residual.

Counts vary from rank to rank, so this needs a ragged collective. Zeros are never worth sending:
`Select` leaves them out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.schedule import checked_whole

Memo = MutableMapping[str, Any]
Estimator = Callable[[Tensor, int, Memo], float]  # magnitudes (n,), k, state -> threshold
PROBES = 8  # counting passes of a correction, before the exact threshold is taken instead


def exact(size: Tensor, k: int, state: Memo) -> float:
    """The k-th largest magnitude."""
    return float(size.topk(k).values[-1])


@dataclass(frozen=True, kw_only=True)
class Threshold:
    """Entries whose magnitude is at least an estimated threshold; about k of them, by design.

    The estimate is made anew every `refresh` steps; in between the last one is used, and moved by
    the factor `nudge` when it lets through too many or too few (Ok-Topk). Counts outside `correct`
    times k are corrected at once. Never more than `capacity` times k entries.
    """

    estimate: Estimator = exact
    refresh: int = 1
    nudge: float = 1.0
    correct: tuple[float, float] | None = (0.5, 2.0)
    capacity: float = 2.0

    def __post_init__(self) -> None:
        checked_whole("refresh", self.refresh, 1, "a number of steps; 1 estimates in every one")
        if not self.nudge >= 1:
            raise ValueError(f"nudge must be at least 1.0 (no nudge), got {self.nudge!r}")
        if not isinstance(self.capacity, int | float) or not self.capacity >= 1:
            raise ValueError(
                f"capacity must be at least 1.0 times the density asked for, got {self.capacity!r}"
            )
        if self.correct is not None and not 0 < self.correct[0] <= 1 <= self.correct[1]:
            raise ValueError(
                f"correct must be (low, high) around 1, got {self.correct!r}; (0.5, 2.0) keeps "
                "between half and twice the density asked for"
            )

    def __call__(self, rows: Tensor, k: int, state: Memo) -> Tensor:  # (1, n) -> (count,)
        size = magnitudes(rows)
        if not kernels.finite(size):  # whoever sees it aborts the step: NaN is never hidden
            return kernels.topk(rows, k)
        fresh = state.get("age", 0) % self.refresh == 0 or state.get("k") != k
        state["age"] = 1 if fresh else state["age"] + 1
        state["k"] = k
        theta = self.estimate(size, k, state) if fresh else float(state["threshold"])
        theta, count = settle_threshold(size, k, theta, self.correct, state)
        state["threshold"] = theta if fresh else theta * nudge(count / k, self.nudge, 5 / 4)
        return above(size, theta, int(self.capacity * k))


def nudge(share: float, factor: float, most: float) -> float:
    """What a threshold is multiplied by if it let `share` times k through (Ok-Topk)."""
    if share > most:
        return factor
    return 1 / factor if share < 2 / 3 else 1.0


def magnitudes(rows: Tensor) -> Tensor:  # (1, n) -> (n,)
    """The row's magnitudes, in at least single precision."""
    if rows.shape[0] != 1:
        raise ValueError(
            f"a threshold is estimated for one row, got {rows.shape[0]} of them; use over=by_layer "
            "or over=whole (all-dimension selection is exact: pick=topk)"
        )
    return rows[0].abs().to(torch.promote_types(rows.dtype, torch.float32))


def settle_threshold(
    size: Tensor, k: int, theta: float, bounds: tuple[float, float] | None, state: Memo
) -> tuple[float, int]:
    """A threshold that lets through between low and high times k, and how many that is.

    Too many and too few close in on it from both sides; where the numbers allow nothing between
    (ties), or after `PROBES` passes, the exact threshold is taken. `state["found"]` is what the
    estimate itself let through, as a share of k.
    """
    count = _count(size, theta)
    state["found"] = count / k
    if not math.isfinite(theta) or theta < 0:
        return _exactly(size, k, state)
    if bounds is None:
        return theta, count
    low, high = math.ceil(bounds[0] * k), int(bounds[1] * k)
    many, few = 0.0, math.inf
    for _ in range(PROBES):
        if low <= count <= high:
            return theta, count
        if count > high:
            many = theta
            theta = math.sqrt(many) * math.sqrt(few) if few < math.inf else theta * 1.5
        else:
            few = theta
            theta = math.sqrt(many) * math.sqrt(few) if many > 0 else theta * 0.5
        count = _count(size, theta)
    return _exactly(size, k, state)


def above(size: Tensor, theta: float, capacity: int) -> Tensor:  # (n,) -> (count,)
    """Where the magnitude is at least theta; of more than `capacity` the largest."""
    found, count = kernels.above(size, theta, capacity)
    return found if count <= capacity else kernels.topk(size[None], capacity)


def _count(size: Tensor, theta: float) -> int:
    return kernels.above(size, theta, 0)[1]


def _exactly(size: Tensor, k: int, state: Memo) -> tuple[float, int]:
    theta = exact(size, k, state)
    return theta, _count(size, theta)
