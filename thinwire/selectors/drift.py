"""ADTopk's threshold estimation: the last exact threshold serves until it has probably drifted.

Each layer has an interval. When it is over, the exact k-th magnitude is taken again; with
epsilon = theta / 10 and the drift D = |new theta - old theta| the interval then

    D < epsilon / 2: grows by 2;   D < epsilon: by 1;   D <= 2 epsilon: shrinks by 1;   else: by 2

Every rank votes with its own drift and the largest one counts, so that intervals are the same
everywhere. ADTopk, HPDC 2024 (doi 10.1145/3625549.3658678), section on threshold estimation.

Kept because it was published: where exact selection is a fused sweep it costs more than it saves.
A million gradients at 1 %, one thread: 23 ms with a remembered threshold, 1.2 ms exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.selectors.threshold import Memo, above, exact, magnitudes, settle_threshold

CHANGES = (2, 1, -1, -2)  # of the interval, by how far the threshold has drifted
TOLERANCE = 0.1  # epsilon as a share of the threshold
BOUNDS = (0.5, 2.0)  # times k: what a remembered threshold may let through


@dataclass(frozen=True, kw_only=True)
class Drifting:
    """Flat top-k by a remembered threshold, with an interval for every layer.

    Exact for the first `warmup` turns; the interval starts at `interval` and is never below
    `shortest`.
    """

    interval: int = 5
    shortest: int = 5
    warmup: int = 15
    capacity: ClassVar[float] = BOUNDS[1]

    def __post_init__(self) -> None:
        if not 1 <= self.shortest <= self.interval:
            raise ValueError(
                f"the interval must be at least the shortest one, got interval={self.interval}, "
                f"shortest={self.shortest}"
            )

    def __call__(self, rows: Tensor, k: int, state: Memo) -> Tensor:  # (1, n) -> (count,)
        size = magnitudes(rows)
        turn = int(state.get("turn", 0))
        state["turn"] = turn + 1
        state.pop("vote", None)
        if not kernels.finite(size):  # whoever sees it aborts the step, votes and all
            return kernels.topk(rows, k)
        over = turn >= int(state.get("due", self.warmup + self.interval - 1))
        if turn < self.warmup or over or state.get("k") != k:
            return self._exactly(rows, size, k, state, vote=over)
        theta, _ = settle_threshold(size, k, float(state["threshold"]), BOUNDS, state)
        state["threshold"] = theta
        return above(size, theta, int(BOUNDS[1] * k))

    def settle(self, states: Sequence[Memo], highest: Callable[[Tensor], Tensor]) -> None:
        """After the exchange: every layer whose interval was over gets a new one, agreed by all.

        Who votes when depends on nothing but turns and intervals, which are the same on all ranks;
        only here are they changed.
        """
        voting = [state for state in states if "vote" in state]
        if not voting:
            return
        votes = torch.tensor([state["vote"] for state in voting], dtype=torch.uint8)
        for state, vote in zip(voting, highest(votes).tolist(), strict=True):
            interval = int(state.get("interval", self.interval)) + CHANGES[vote]
            interval = max(self.shortest, interval)
            state.update(interval=interval, due=state["turn"] - 1 + interval)

    def _exactly(self, rows: Tensor, size: Tensor, k: int, state: Memo, vote: bool) -> Tensor:
        theta = exact(size, k, state)
        if vote:
            state["vote"] = _rank_drift(float(state.get("anchor", theta)), theta)
        state.update(threshold=theta, anchor=theta, k=k)
        return kernels.topk(rows, k)


def _rank_drift(before: float, now: float) -> int:
    """How far, as a place in CHANGES."""
    drift, epsilon = abs(before - now), TOLERANCE * before
    return (drift >= epsilon / 2) + (drift >= epsilon) + (drift > 2 * epsilon)
