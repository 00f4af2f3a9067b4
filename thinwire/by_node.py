"""ByNode: dense sums inside a node, where wires are fast, and a recipe between nodes.

    1. inside the node each rank gets the node's sum of its own share of the parameters
    2. ranks with the same share, one per node, reduce those sums with the inner recipe
    3. inside the node all ranks get all means

Selection sees the sum of a whole node, and costs that grow with P grow with the number of nodes.
The rank that owns a share keeps its residual; the other ranks have handed theirs over.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.bucket import Bucket
from thinwire.comm.metered import gathered, mark
from thinwire.comm.nodes import Groups, check_nodes, group_ranks
from thinwire.comm.pairwise import Pairwise
from thinwire.describe import spell
from thinwire.layout import Layout, Slot
from thinwire.operand import working_dtype
from thinwire.payload import at_runs, nothing
from thinwire.protocols import Comm, Reduced, Reducer, Traffic
from thinwire.remember import refuse_memory
from thinwire.wire import Span


@dataclass(frozen=True)
class ByNode:
    """`inner` between nodes, on the sums of each."""

    inner: Reducer
    nodes: Groups
    keeps: ClassVar[str] = "owner"

    def __post_init__(self) -> None:
        check_nodes(self.nodes)
        why = "a node would keep what another rank has handed over"
        refuse_memory(self.inner, "ByNode", why)

    __repr__ = spell

    def reduce(self, bucket: Bucket, comm: Comm) -> Reduced:
        groups = group_ranks(self.nodes, comm.size)
        here = next(group for group in groups if comm.rank in group)
        place = here.index(comm.rank)
        node, across = Pairwise(comm, here), Pairwise(comm, [group[place] for group in groups])
        packed, x = _pack(bucket)
        shares = deal(packed, len(here))
        runs = [_run(share) for share in shares]
        own = slice(*runs[place])
        mark(comm, "sum in node")
        summed = _sum_shares(x, runs, place, node)
        if not kernels.finite(summed[own]):  # whatever the inner recipe picks, it will see it
            summed[own] = float("nan")
        unused = bucket.unused
        if unused is not None:  # by everybody on this node
            unused = frozenset(_names_of(_votes(unused, packed, node, x).amin(dim=0), packed))
        inside = replace(
            bucket.at("between"), flat=summed, layout=Layout(shares[place], packed.numel),
            unused=unused,
        )  # fmt: skip
        before = summed[own].clone()  # the inner recipe may write over what it reduces
        reduced = self.inner.reduce(inside, across)
        mark(comm, "share in node")
        mean = _gather_shares(reduced.mean, runs, place, node).div_(len(here))
        names: tuple[str, ...] = ()
        if unused is not None:  # each rank has learned it of its own share
            names = _names_of(_votes(reduced.unused, packed, node, x).amax(dim=0), packed)
        if not kernels.finite(mean):
            whole = _unpack(mean, bucket.layout)
            nil = nothing(bucket.layout.numel)
            return Reduced(mean=whole, sent=nil, finite=False, unused=names)
        # theirs is handed over; of my own share, what the node has not sent stays with me
        x[own] -= before
        sent = at_runs(reduced.sent.add_into(x), bucket.layout.runs, bucket.layout.numel)
        entries = reduced.entries * len(here)  # others of the node have as much of their shares
        whole = _unpack(mean, bucket.layout)
        return Reduced(mean=whole, sent=sent, unused=names, kept=entries)

    def traffic(self, layout: Layout, world: int, step: int = 0) -> Traffic:
        """Of the rank with the largest share; at most so many rounds, as all are between pairs."""
        groups = group_ranks(self.nodes, world)
        size = len(groups[0])
        packed = Layout.packed(layout.slots)
        shares = deal(packed, size)
        largest = max(shares, key=lambda slots: sum(slot.numel for slot in slots))
        mine = 4 * sum(slot.numel for slot in largest)
        inside = Traffic(rounds=2 * (size - 1), bytes=4 * packed.size - mine + gathered(mine, size))
        between = self.inner.traffic(Layout(largest, packed.numel), len(groups), step)
        turns = max(1, len(groups) - 1)
        return inside + replace(between, rounds=between.rounds * turns)


def deal(layout: Layout, size: int) -> list[tuple[Slot, ...]]:
    """Whole parameters to each rank of a node, in their order, about equally many entries."""
    shares: list[list[Slot]] = [[] for _ in range(size)]
    before = 0
    for slot in layout.slots:
        middle = before + slot.numel / 2
        shares[min(size - 1, int(middle * size / max(1, layout.size)))].append(slot)
        before += slot.numel
    return [tuple(share) for share in shares]


def _run(slots: Sequence[Slot]) -> Span:
    """From the first to the last entry of these."""
    stops = [slot.stop for slot in slots]
    return (slots[0].offset, max(stops)) if slots else (0, 0)


def _sum_shares(x: Tensor, runs: list[Span], place: int, node: Pairwise) -> Tensor:
    """The node's sum at my share; other entries are nobody's business here."""
    start, stop = runs[place]
    parts = node.all_to_all([x[a:b] for a, b in runs], [stop - start] * node.size)
    out = torch.zeros_like(x)
    for part in parts:
        out[start:stop] += part
    return out


def _gather_shares(mean: Tensor, runs: list[Span], place: int, node: Pairwise) -> Tensor:
    got = node.all_gather(mean[slice(*runs[place])], [b - a for a, b in runs])
    out = torch.zeros_like(mean)
    for (start, stop), part in zip(runs, got, strict=True):
        out[start:stop] = part
    return out


def _pack(bucket: Bucket) -> tuple[Layout, Tensor]:
    """Our slots of the bucket side by side, copied; poisoned if a gradient was not finite."""
    x = bucket.take()
    wide = working_dtype(x.dtype)
    runs = [x[start:stop].to(wide) for start, stop in bucket.layout.runs]
    packed = torch.cat(runs) if runs else x[:0].to(wide)
    return Layout.packed(bucket.layout.slots), bucket.poison(packed)


def _unpack(flat: Tensor, layout: Layout) -> Tensor:
    out = torch.zeros(layout.numel, dtype=flat.dtype, device=flat.device)
    parts = flat.split([stop - start for start, stop in layout.runs])
    for (start, stop), part in zip(layout.runs, parts, strict=True):
        out[start:stop] = part
    return out


def _votes(names: Collection[str], layout: Layout, node: Pairwise, x: Tensor) -> Tensor:
    """Which parameters each rank of the node names: (ranks, parameters)."""
    named = [slot.name in names for slot in layout.slots]
    flags = torch.tensor(named, dtype=torch.uint8, device=x.device)
    return torch.stack(node.all_gather(flags, [len(named)] * node.size))


def _names_of(votes: Tensor, layout: Layout) -> tuple[str, ...]:
    slots = zip(layout.slots, votes.tolist(), strict=True)
    return tuple(slot.name for slot, vote in slots if vote)
