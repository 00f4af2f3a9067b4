"""Ok-Topk as published: regions of equal load, and only the k largest sums go on.

    1. every `balance_every` steps: agree on regions that hold about as many of my entries each
       (the mean of all ranks' cut points)
    2. each rank sends the owner of every region its entries there; owners add them up
    3. every `refresh` steps: everybody gets all sums and keeps the exact k largest; the k-th is
       the threshold. In between owners keep what is above it, and it is nudged when they keep too
       many or too few
    4. if one owner has far more than the others, survivors are spread evenly; all are gathered

My share is what of mine is in the result: the sender keeps what an owner drops. Li & Hoefler,
PPoPP 2022, arXiv 2201.07598; intervals and factors of its authors' VGG runs.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from thinwire.collectives.select import difference, share, surviving
from thinwire.collectives.split import (
    all_counts,
    check_factors,
    check_form,
    check_steps,
    cut,
    split_reduce,
)
from thinwire.comm.metered import COUNT, all_reduced
from thinwire.layout import regions
from thinwire.payload import Payload, Sparse, largest, only, together
from thinwire.protocols import Traffic
from thinwire.selectors.threshold import nudge
from thinwire.state import State
from thinwire.wire import Span, Wire
from thinwire.wire.link import Link


@dataclass(frozen=True, kw_only=True)
class OkTopk:
    """A sum of which about the k largest entries are kept, by the paper in 6k words per rank.

    That bound of 24k bytes holds while thresholds fit. Every exact step exceeds it, and so do the
    first steps up to 31, in which thresholds lag the growing residual. Rank 0, bytes over k(P-1)/P,
    4 workers, 42,000 gradients, 1 % (docs/communication.md has more):

        step    0      1-3    4-31   32     33-63   64
        mean    30.1   24.5   28.5   46.7   22.8    38.3

    Args:
        balance_every: Steps after which regions are cut anew, so that loads are equal.
        refresh: Steps after which thresholds are exact.
        nudge: Factor by which the global threshold moves in between, up or down.
        spread_above: The largest count over the mean, from which on owners balance what they hold.
        form: "all_to_all", or "pairwise": messages to one rank after the other.

    Example:
        >>> OkTopk(refresh=16).balance_every
        64
    """

    balance_every: int = 64
    refresh: int = 32
    nudge: float = 1.008
    spread_above: float = 4.0  # times the mean count, the largest may have
    form: str = "pairwise"
    ragged: ClassVar[bool] = True
    keeps: ClassVar[str] = "sender"

    def __post_init__(self) -> None:
        check_form(self.form)
        check_steps(balance_every=self.balance_every, refresh=self.refresh)
        check_factors(nudge=self.nudge, spread_above=self.spread_above)

    def sum(
        self, mine: Sparse, k: int, step: int, link: Link, state: State
    ) -> tuple[Sparse, Payload]:
        spans = self._regions(mine, step, link, state)
        parts, reduced = split_reduce(mine, spans, link, self.form)
        exact = step % self.refresh == 0 or "threshold" not in state
        if not exact:
            reduced = only(reduced, ~(reduced.values.abs() < state["threshold"]))  # NaN stays
        counts = all_counts(reduced, link)
        if not exact and max(counts) * len(counts) > self.spread_above * sum(counts):
            reduced, counts, spans = rebalance(reduced, counts, link)
        rounded = link.round(reduced)
        link.phase("gather all" if exact else "gather")
        total = together(link.gather_spans(rounded, spans, counts), mine.numel)
        if exact and total.entries:
            total = largest(total, k)
            lowest = float(total.values.abs().min())
            if math.isfinite(lowest):
                state["threshold"] = lowest
        elif not exact:
            state["threshold"] *= nudge(total.entries / k, self.nudge, 4 / 3)
        own, error = together(parts, mine.numel), difference(rounded, reduced)
        return total, share([surviving(own, total)], [surviving(error, total)], mine.numel)

    def traffic(self, k: int, n: int, world: int, wire: Wire, step: int = 0) -> Traffic:
        """Of an ordinary step if thresholds let k through; every `refresh` steps the sums of all go
        round instead. A floor: thresholds lag a growing residual."""
        length = round(n / world)
        part = wire.nbytes(round(k / world), length)
        cuts = Traffic(rounds=1, bytes=all_reduced(8 * (world - 1), world))
        owned = round(n / world * (1 - (1 - k / n) ** world)) if n else 0
        kept = wire.nbytes(owned if step % self.refresh == 0 else round(k / world), length)
        first, second = (part + COUNT, kept + COUNT + (0 if wire.fixed else COUNT))
        turns = world - 1 if self.form == "pairwise" else 1
        gathers = 2 * turns
        sent = (world - 1) * (first + second)
        usual = Traffic(rounds=turns + gathers, bytes=sent, floor=world > 1)
        return cuts + usual if step % self.balance_every == 0 else usual

    def _regions(self, mine: Sparse, step: int, link: Link, state: State) -> list[Span]:
        world = link.comm.size
        cuts = state.get("cuts")
        if cuts is None or len(cuts) != world - 1 or step % self.balance_every == 0:
            link.phase("cut")
            summed = link.comm.all_reduce(proposal(mine, world))
            cuts = state["cuts"] = summed // world
        edges = [0, *cuts.tolist(), mine.numel]
        return list(itertools.pairwise(edges))


def proposal(mine: Sparse, world: int) -> torch.Tensor:
    """Where this rank would cut, so that regions hold equally many of its entries."""
    count = mine.entries // world
    if count == 0:
        starts = [start for start, _ in regions(mine.numel, world)]
        return torch.tensor(starts[1:], dtype=torch.int64, device=mine.indices.device)
    return mine.indices[count : count * world : count].clone()


def rebalance(mine: Sparse, counts: list[int], link: Link) -> tuple[Sparse, list[int], list[Span]]:
    """Everyone's entries as one list in rank order, dealt out again in equal parts.

    They travel unrounded: who has them in the end rounds them, and answers for it.
    """
    rank, world, total = link.comm.rank, link.comm.size, sum(counts)
    before = [sum(counts[:r]) for r in range(world + 1)]
    goals = [total * r // world for r in range(world + 1)]
    edges = [min(max(goal - before[rank], 0), mine.entries) for goal in goals]
    link.phase("spread")
    everywhere = [(0, mine.numel)] * world
    plain = Link(link.comm, Wire(indices=link.wire.indices))
    got = together(plain.all_to_all(cut(mine, edges), everywhere), mine.numel)
    return got, [b - a for a, b in itertools.pairwise(goals)], everywhere
