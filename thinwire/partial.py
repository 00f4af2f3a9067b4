"""Which parameters to leave dense: those whose compression costs more than it hides.

Two resources, in the order of backward (the idle-time model of ADTopk's partial sparsification):

    compute   r[l] = r[l-1] + backward[l] + (1 - dense share) * selection[l]
    network   e[l] = max(e[l-1], r[l]) + exchange[l]         what counts is the last e

Parameters up to some size go dense; every size there is, is tried. The entries that these cost are
taken from the budget of the others, so that the total stays what the density asks for.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

import torch

from thinwire.bucket import kept
from thinwire.choose import Assigned, Trials, Turn, average_over_ranks
from thinwire.layout import Slot
from thinwire.protocols import Comm
from thinwire.route import Rule
from thinwire.schedule import Density

DENSE, SPARSE = 0, 1
LEAST = 0.25  # of the density, which the other parameters keep at least


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What one bucket took, all of it sparse and all of it dense, in seconds; its parameters."""

    gap: float
    select: float
    sparse: float
    dense: float
    slots: tuple[Slot, ...]

    @property
    def numel(self) -> int:
        return sum(slot.numel for slot in self.slots)


@dataclass(frozen=True, kw_only=True)
class Partial:
    """Decides between dense (0) and sparse (1); parameters under the rule `always` are dense anyway
    and cost no budget."""

    density: Density
    always: Rule

    def __call__(self, trials: Trials, counted: Sequence[Sequence[int]], comm: Comm) -> Assigned:
        buckets = _measure(trials, counted, comm)
        if not buckets:
            return lambda slot: (SPARSE, 1.0)
        slots = [slot for bucket in buckets for slot in bucket.slots if not self.always(slot)]
        step = counted[-1][-1] + 1
        budget = {slot.name: kept(slot, self.density, step) for slot in slots}
        best, least = 0, math.inf
        for cut in (0, *sorted({slot.numel for slot in slots})):
            if _rest(cut, slots, budget) < LEAST:
                break
            seconds = find_end(cut, buckets)
            if seconds < least * (1 - 1e-9):
                best, least = cut, seconds
        thinner = _rest(best, slots, budget)
        names = {slot.name for slot in slots if slot.numel <= best}
        return lambda slot: (DENSE, 1.0) if slot.name in names else (SPARSE, thinner)


def find_end(cut: int, buckets: Sequence[Measured]) -> float:
    """When the last exchange ends, if parameters of up to `cut` entries go dense."""
    start_sparse, a_sparse = line([(b.numel, b.sparse) for b in buckets])
    start_dense, a_dense = line([(b.numel, b.dense) for b in buckets])
    ready = end = 0.0
    for bucket in buckets:
        dense = sum(slot.numel for slot in bucket.slots if slot.numel <= cut)
        rest = bucket.numel - dense
        ready += bucket.gap + bucket.select * rest / max(1, bucket.numel)
        send = start_sparse + a_sparse * rest if rest else 0.0
        send += start_dense + a_dense * dense if dense else 0.0
        end = max(end, ready) + send
    return end


def _rest(cut: int, slots: Sequence[Slot], budget: dict[str, int]) -> float:
    """The share of their own budget that is left to parameters above the cut; 0 if none are."""
    spent = sum(slot.numel for slot in slots if slot.numel <= cut)
    others = sum(budget[slot.name] for slot in slots if slot.numel > cut)
    return (sum(budget.values()) - spent) / others if others else float(spent == 0)


def line(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Seconds to begin with, and a gradient: a straight line, neither of them negative."""
    n, t = [size for size, _ in points], [seconds for _, seconds in points]
    spread = sum((size - mean(n)) ** 2 for size in n)
    slope = 0.0
    if spread:
        slope = sum((a - mean(n)) * (b - mean(t)) for a, b in points) / spread
    start = mean(t) - slope * mean(n)
    if slope <= 0 or start < 0:  # too few buckets to tell: all of it is a matter of size
        return 0.0, sum(t) / max(1, sum(n))
    return start, slope


def interpolate(points: Sequence[tuple[float, float]], x: float) -> float:
    """On the way from one known point to the next; beyond the last ones, straight on."""
    after = min(len(points) - 1, max(1, bisect_left(points, (x, 0.0))))
    (x0, y0), (x1, y1) = points[after - 1], points[after]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def _measure(trials: Trials, counted: Sequence[Sequence[int]], comm: Comm) -> list[Measured]:
    """The buckets of the last step that was tried, with times that all ranks share."""
    last = trials.turns.get(counted[DENSE][-1], [])
    rows: list[list[float]] = []
    for place, turn in enumerate(last):
        sparse = _turns(trials, counted[SPARSE], place, turn)
        dense = _turns(trials, counted[DENSE], place, turn)
        if not sparse or not dense:
            rows = []
            break
        rows.append([
            mean(t.gap for t in sparse),
            mean(t.select + t.scatter for t in sparse) - mean(t.select + t.scatter for t in dense),
            mean(t.exchange for t in sparse),
            mean(t.exchange for t in dense),
        ])  # fmt: skip
    counts = comm.all_gather(torch.tensor([len(rows)]), [1] * comm.size)
    if not rows or any(int(count) != len(rows) for count in counts):
        return []  # what one rank has not seen, nobody has
    numbers = average_over_ranks([number for row in rows for number in row], comm)
    return [
        Measured(
            gap=numbers[4 * i], select=max(0.0, numbers[4 * i + 1]), sparse=numbers[4 * i + 2],
            dense=numbers[4 * i + 3], slots=turn.layout.slots,
        )
        for i, turn in enumerate(last)
    ]  # fmt: skip


def _turns(trials: Trials, steps: Sequence[int], place: int, like: Turn) -> list[Turn]:
    found = [trials.turns[s][place] for s in steps if len(trials.turns.get(s, [])) > place]
    return [turn for turn in found if turn.layout == like.layout]
