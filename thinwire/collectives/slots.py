"""Our own sparse sum, below Ok-Topk's bound: coded slots of fixed size, and nobody asks for sizes.

    1. every `every` steps: all-reduce a histogram of where entries lie; cut the bucket into
       regions that get equally many
    2. each rank fills a slot of fixed bytes for every owner, the largest entries first
       (all-to-all)
    3. owners add them up, and to them what they hold themselves in their region, which costs
       nothing; they fill a slot with the sums above the threshold (all-gather)
    4. each slot also brings a small histogram of its owner's sums: from all of them everybody
       works out the same threshold for the next step

So an ordinary step is two collectives of static size. What an owner does not pass on it puts into
its own residual, under the negative of its share; what does not fit into a slot stays with its
sender. The first step has no threshold: each owner passes on its part of k.

Beside the published method: no size exchange, no balancing, no exact step that gathers all sums,
thresholds that follow a growing residual. A selector may hand over more than k entries (`reach`),
because those in my own region need no bytes and slots are then always full.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from thinwire import kernels
from thinwire.collectives.select import difference, share
from thinwire.collectives.split import check_factors, check_form, check_steps, split
from thinwire.comm.metered import all_reduced, gathered
from thinwire.payload import Payload, Sparse, add_up, only, together
from thinwire.protocols import Traffic
from thinwire.state import State
from thinwire.wire import HEADER, Span, Wire
from thinwire.wire.indices import Int32
from thinwire.wire.link import Link
from thinwire.wire.rice import Rice, Smallest

BINS = 32  # of the histogram of sums: an eighth of an octave each, two octaves up and down
OCTAVE = 8
LARGEST_INDEX = 16  # bytes that hold any one index, in any code
AIM = 1.03  # times k: owners whose slot is full hold a few back
PLACES = (64, 1024)  # of the histogram of positions: at least, at most
WIDTH = 4096  # positions a place stands for, in between


@dataclass(frozen=True, kw_only=True)
class Slots:
    """About the k largest entries of the sum, in two exchanges of slots of fixed size.

    Args:
        every: Steps after which regions are cut anew.
        wide: Room of a slot on the way to an owner, in k/P entries.
        slack: Room of a slot on the way back, in k/P entries.
        reach: How many times k entries a selector may offer. Those in a rank's own region cost
            nothing.
        form: "all_to_all", or "pairwise": messages to one rank after the other.

    Example:
        >>> Slots(slack=1.2).keeps
        'owner'
    """

    every: int = 64
    wide: float = 1.5
    slack: float = 1.1
    reach: float = 4.0
    form: str = "all_to_all"
    ragged: ClassVar[bool] = True
    keeps: ClassVar[str] = "owner"

    def __post_init__(self) -> None:
        check_form(self.form)
        check_steps(every=self.every)
        check_factors(wide=self.wide, slack=self.slack, reach=self.reach)

    def sum(
        self, mine: Sparse, k: int, step: int, link: Link, state: State
    ) -> tuple[Sparse, Payload]:
        link.wire = coded(link.wire)
        if self.form == "pairwise":
            link.pairwise()
        rank, world, n = link.comm.rank, link.comm.size, mine.numel
        spans = self._regions(mine, step, link, state)
        size = mine.values.element_size()
        inbox = self._room(self.wide, k, n, world, link.wire, size)
        room = self._room(self.slack, k, n, world, link.wire, size)
        parts = split(mine, spans)
        own, parts[rank] = parts[rank], Sparse(mine.indices[:0], mine.values[:0], n)
        link.phase("split")
        sent = [link.fit(part, span, inbox) for part, span in zip(parts, spans, strict=True)]
        reduced = add_up([*link.all_to_all_slots(sent, spans, inbox), own])
        threshold = state.get("threshold")
        if threshold is None:
            threshold = float(quota(reduced.values.abs(), -(-k // world)))
        large = only(reduced, ~(reduced.values.abs() < threshold))  # NaN is passed on
        passed = link.fit(large, spans[rank], room)
        head = count_above(reduced.values, threshold)
        if not kernels.finite(mine.values):  # said in so many words: no slot is too small for it
            head[0] = float("nan")
        link.phase("gather")
        got, heads = link.gather_slots(passed, head, spans, room)
        if not all(kernels.finite(head) for head in heads):
            got.append(_nan(mine))
        learned = next_threshold(heads, round(AIM * k))
        if learned is not None:
            state["threshold"] = learned
        elif "threshold" in state:
            del state["threshold"]
        # passed on rounded, the rest not at all: both differences are the owner's
        there = kernels.member(reduced.indices, passed.indices)
        error, rest = difference(passed, only(reduced, there)), only(reduced, ~there)
        dropped = Sparse(rest.indices, -rest.values, n)
        return together(got, n), share([*sent, own], [error, dropped], n)

    def traffic(self, k: int, n: int, world: int, wire: Wire, step: int = 0) -> Traffic:
        inbox = self._room(self.wide, k, n, world, coded(wire), 4)
        room = self._room(self.slack, k, n, world, coded(wire), 4)
        head = 4 * (2 + BINS)
        turns = world - 1 if self.form == "pairwise" else 1
        usual = Traffic(rounds=2 * turns, bytes=(world - 1) * inbox + gathered(room + head, world))
        if step % self.every:
            return usual
        look = 2 * turns if self.form == "pairwise" else 1
        return usual + Traffic(rounds=look, bytes=all_reduced(4 * places(n), world))

    def _room(self, factor: float, k: int, n: int, world: int, wire: Wire, itemsize: int) -> int:
        """Bytes of a slot for `factor` times k/P entries, and room for chance if these are few.

        Regions are of equal load, not length: at least one entry fits, wherever it lies.
        """
        mean = k / world
        entries = math.ceil(max(factor * mean, mean + 2 * math.sqrt(mean)))
        length = -(-n // world)
        one = HEADER + wire.values.nbytes(1, itemsize) + LARGEST_INDEX
        return HEADER + max(one, wire.nbytes(min(entries, length), length, itemsize))

    def _regions(self, mine: Sparse, step: int, link: Link, state: State) -> list[Span]:
        world = link.comm.size
        cuts = state.get("cuts")
        if cuts is None or len(cuts) != world + 1 or step % self.every == 0:
            width = max(1, -(-mine.numel // places(mine.numel)))
            count = torch.bincount(mine.indices // width, minlength=places(mine.numel))
            link.phase("cut")
            everyone = link.comm.all_reduce(count.to(torch.int32))
            cuts = state["cuts"] = torch.tensor(balance(everyone, width, mine.numel, world))
        edges = cuts.tolist()
        return list(itertools.pairwise(edges))


def coded(wire: Wire) -> Wire:
    """Slots want codes that cost nothing for positions without an entry: others are replaced."""
    good = isinstance(wire.indices, Int32 | Rice | Smallest)
    return wire if good else replace(wire, indices=Smallest())


def _nan(like: Sparse) -> Sparse:
    """What tells everybody that this step counts for nothing."""
    return Sparse(like.indices.new_zeros(1), like.values.new_full((1,), math.nan), like.numel)


def places(n: int) -> int:
    """How many bins the histogram of positions has."""
    return max(1, min(n, PLACES[1], max(PLACES[0], n // WIDTH)))


def balance(counts: Tensor, width: int, n: int, world: int) -> list[int]:
    """Cuts between which equally many entries lie; inside a place they are taken as even."""
    # whole numbers, so that every machine cuts alike; 1 each, so that empty stretches count a bit
    load = (counts.to(torch.int64).cpu() * max(1, counts.numel()) + 1) * world
    reached = torch.cat([load.new_zeros(1), load.cumsum(0)])
    wanted = int(reached[-1]) * torch.arange(1, world) // world
    place = torch.searchsorted(reached, wanted, right=True).clamp(max=counts.numel()) - 1
    inside = (wanted - reached[place]) * width // load[place]
    return [0, *(place * width + inside).clamp(max=n).tolist(), n]


def quota(size: Tensor, count: int) -> Tensor:
    """The magnitude of the count-th largest; of fewer, 0."""
    if size.numel() <= count:
        return size.new_zeros(())
    return size[kernels.topk(size[None], count)].min()


def count_above(sums: Tensor, reference: float) -> Tensor:  # (m,) -> (2 + BINS,) float32
    """How many sums there are, and how many reach the reference times 2^-2, ... 2^(2 - 1/8)."""
    size = sums.abs().to(torch.float32)
    if not 0 < reference < math.inf:
        reference = float(size.max()) / 4 if size.numel() else 0.0
    place = ((size / reference).log2() * OCTAVE + BINS / 2).floor().clamp(-1, BINS - 1)
    bins = place.nan_to_num(-1.0).to(torch.int64) + 1  # NaN: of nothing but zeros, or a NaN
    counts = torch.bincount(bins, minlength=BINS + 1).flip(0).cumsum(0).flip(0)[1:]
    counts = counts.to(torch.float32)
    return torch.cat([counts.new_tensor([reference, size.numel()]), counts])


def next_threshold(heads: list[Tensor], k: int) -> float | None:
    """Where the sums of all owners together would have been k; None if the sketches do not reach.

    Then the next step does without, as the first: each owner passes on its part of k.
    """
    tables = [head.double().cpu().numpy() for head in heads]
    usable = [table for table in tables if table[0] > 0]  # others own nothing but zeros
    if not usable or not all(np.isfinite(table).all() for table in tables):
        return None
    steps = np.arange(BINS) / OCTAVE - BINS / OCTAVE / 2
    edges = [np.log2(t[0]) + steps for t in usable]
    points = np.unique(np.concatenate(edges))
    total = sum(
        np.interp(points, edge, t[2:], right=0.0) for edge, t in zip(edges, usable, strict=True)
    )
    if total[0] < min(k, 0.9 * sum(table[1] for table in usable)):  # most lie below all edges
        return None
    # counts fall as thresholds rise; np.interp wants its abscissa to rise
    return float(2.0 ** np.interp(k, total[::-1], points[::-1]))
