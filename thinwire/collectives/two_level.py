"""Two levels: dense inside a node, where the wires are fast, and a recipe between nodes.

    1. inside the node each rank gets the node's sum of its own share of the parameters
    2. the ranks with the same share, one a node, reduce those sums with the inner recipe
    3. inside the node everybody gets all means

Selection sees the sum of a whole node, and P, for everything that grows with it, is the number of
nodes. What is not sent between nodes is kept by the rank whose share it is: the others have handed
theirs over.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.bucket import Bucket
from thinwire.collectives.gather import AllGather
from thinwire.combinators import memories
from thinwire.comm.metered import gathered, mark
from thinwire.comm.pairwise import Pairwise
from thinwire.layout import Layout, Slot
from thinwire.operand import working_dtype
from thinwire.payload import Dense, Parts, nothing
from thinwire.protocols import Collective, Comm, Reduced, Reducer, Traffic
from thinwire.wire import Wire

# how launchers tell the number of ranks on a node: torchrun, Open MPI, MPICH, SLURM
_LAUNCHERS = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS",
              "SLURM_NTASKS_PER_NODE")  # fmt: skip
Nodes = int | tuple[tuple[int, ...], ...] | None


@dataclass(frozen=True, kw_only=True)
class TwoLevel:
    """As `collective=` of a recipe: dense inside nodes, and `between` them that collective.

    `nodes` lists the ranks of each, or says how many each has; None asks the launcher, whose ranks
    are numbered node by node. A selector must see the node's sum, so this is not a collective
    itself: the recipe is put inside a `ByNode`, and `between` is the recipe's own if none is given.
    """

    nodes: Nodes = None
    between: Collective | None = None

    def __post_init__(self) -> None:
        check_nodes(self.nodes)
        if isinstance(self.between, TwoLevel):
            raise ValueError(f"there are two levels, got a third in {self.between!r}; give one")

    def traffic(self, k: int, n: int, world: int, wire: Wire, step: int = 0) -> Traffic:
        """If the node's ranks have equal shares."""
        size = len(grouped(told(self.nodes), world)[0])
        share = 4 * (n // size)
        inside = Traffic(rounds=2 * (size - 1), bytes=2 * gathered(share, size))
        merge = self.between or AllGather()
        return inside + merge.traffic(k // size, n // size, world // size, wire, step)


@dataclass(frozen=True)
class ByNode:
    """`inner` between nodes, on the sums of each."""

    inner: Reducer
    nodes: int | tuple[tuple[int, ...], ...]
    keeps: ClassVar[str] = "owner"

    def __post_init__(self) -> None:
        check_nodes(self.nodes)
        if memories(self.inner):
            raise ValueError(
                "a memory inside a node would keep what another rank has handed over; put Remember "
                f"outside: Remember(ByNode(...)), got {self.inner}"
            )

    def reduce(self, bucket: Bucket, comm: Comm) -> Reduced:
        groups = grouped(self.nodes, comm.size)
        here = next(group for group in groups if comm.rank in group)
        place = here.index(comm.rank)
        node, across = Pairwise(comm, here), Pairwise(comm, [group[place] for group in groups])
        packed, x = _packed(bucket)
        shares = dealt(packed, len(here))
        own = slice(*_run(shares[place]))
        mark(comm, "sum in node")
        summed = _summed(x, shares, place, node)
        unused = bucket.unused
        if unused is not None:  # by everybody on this node
            unused = frozenset(_voted(_votes(unused, packed, node, x).amin(dim=0), packed))
        inside = replace(
            bucket.at("between"), flat=summed, layout=Layout(shares[place], packed.numel),
            unused=unused, poisoned=not kernels.finite(summed[own]),
        )  # fmt: skip
        before = summed[own].clone()  # the inner recipe may write over what it reduces
        reduced = self.inner.reduce(inside, across)
        mark(comm, "share in node")
        mean = _gathered(reduced.mean, shares, place, node).div_(len(here))
        names: tuple[str, ...] = ()
        if unused is not None:  # each rank has learned it of its own share
            names = _voted(_votes(reduced.unused, packed, node, x).amax(dim=0), packed)
        if not kernels.finite(mean):
            whole = _unpacked(mean, bucket.layout)
            nil = nothing(bucket.layout.numel)
            return Reduced(mean=whole, sent=nil, finite=False, unused=names)
        # theirs is handed over; of my own share, what the node has not sent stays with me
        x[own] -= before
        sent = _parts(reduced.sent.add_into(x), bucket.layout)
        entries = reduced.entries * len(here)  # others of the node have as much of their shares
        whole = _unpacked(mean, bucket.layout)
        return Reduced(mean=whole, sent=sent, unused=names, kept=entries)

    def traffic(self, layout: Layout, world: int, step: int = 0) -> Traffic:
        """Of the rank with the largest share; at most so many rounds, as all are between pairs."""
        groups = grouped(self.nodes, world)
        size = len(groups[0])
        packed = contiguous(layout)
        shares = dealt(packed, size)
        largest = max(shares, key=lambda slots: sum(slot.numel for slot in slots))
        mine = 4 * sum(slot.numel for slot in largest)
        inside = Traffic(rounds=2 * (size - 1), bytes=4 * packed.size - mine + gathered(mine, size))
        between = self.inner.traffic(Layout(largest, packed.numel), len(groups), step)
        turns = max(1, len(groups) - 1)
        return inside + replace(between, rounds=between.rounds * turns)


def check_nodes(nodes: Nodes) -> None:
    if nodes is None:
        return
    if isinstance(nodes, int):
        good = not isinstance(nodes, bool) and nodes >= 1
    else:
        listed = isinstance(nodes, tuple | list) and all(isinstance(g, tuple | list) for g in nodes)
        flat = [rank for group in nodes for rank in group] if listed else []
        even = listed and len({len(group) for group in nodes}) == 1
        good = even and sorted(flat) == list(range(len(flat)))
    if not good:
        raise ValueError(
            "nodes must be the number of ranks on each, or a list of all ranks of each, equally "
            f"many, got {nodes!r}; e.g. nodes=8, or nodes=((0, 1), (2, 3))"
        )


def told(nodes: Nodes) -> int | tuple[tuple[int, ...], ...]:
    """The nodes as given, or as the launcher says.

    Asked when a recipe is built: ranks that were told different numbers then find out when they
    compare recipes.
    """
    if nodes is not None:
        return nodes
    said = next((os.environ[name] for name in _LAUNCHERS if name in os.environ), None)
    if said is None or not said.isdigit() or int(said) < 1:
        raise ValueError(
            f"the launcher does not say how many ranks a node has ({', '.join(_LAUNCHERS)}), got "
            f"{said!r}; say it: TwoLevel(nodes=8), or collective='two_level(8)'"
        )
    return int(said)


def grouped(nodes: int | tuple[tuple[int, ...], ...], world: int) -> list[list[int]]:
    """The ranks of every node."""
    if isinstance(nodes, int):
        if world % nodes:
            raise ValueError(f"{world} ranks do not make nodes of {nodes}; give nodes= that fit")
        return [list(range(start, start + nodes)) for start in range(0, world, nodes)]
    if sum(len(group) for group in nodes) != world:
        raise ValueError(f"nodes={nodes} names other ranks than the {world} there are")
    return [list(group) for group in nodes]


def contiguous(layout: Layout) -> Layout:
    """The same slots without gaps between them."""
    slots, offset = [], 0
    for slot in layout.slots:
        slots.append(replace(slot, offset=offset))
        offset += slot.numel
    return Layout(tuple(slots), offset)


def dealt(layout: Layout, size: int) -> list[tuple[Slot, ...]]:
    """Whole parameters to each rank of a node, in their order, about equally many entries."""
    shares: list[list[Slot]] = [[] for _ in range(size)]
    before = 0
    for slot in layout.slots:
        middle = before + slot.numel / 2
        shares[min(size - 1, int(middle * size / max(1, layout.size)))].append(slot)
        before += slot.numel
    return [tuple(share) for share in shares]


def _run(slots: Sequence[Slot]) -> tuple[int, int]:
    """From the first to the last entry of these."""
    stops = [slot.offset + slot.numel for slot in slots]
    return (slots[0].offset, max(stops)) if slots else (0, 0)


def _summed(x: Tensor, shares: list[tuple[Slot, ...]], place: int, node: Pairwise) -> Tensor:
    """The node's sum at my share; other entries are nobody's business here."""
    runs = [_run(share) for share in shares]
    start, stop = runs[place]
    parts = node.all_to_all([x[a:b] for a, b in runs], [stop - start] * node.size)
    out = torch.zeros_like(x)
    for part in parts:
        out[start:stop] += part
    return out


def _gathered(mean: Tensor, shares: list[tuple[Slot, ...]], place: int, node: Pairwise) -> Tensor:
    runs = [_run(share) for share in shares]
    got = node.all_gather(mean[slice(*runs[place])], [b - a for a, b in runs])
    out = torch.zeros_like(mean)
    for (start, stop), part in zip(runs, got, strict=True):
        out[start:stop] = part
    return out


def _packed(bucket: Bucket) -> tuple[Layout, Tensor]:
    """Our slots of the bucket side by side, copied; poisoned if a gradient was not finite."""
    x = bucket.take()
    wide = working_dtype(x.dtype)
    runs = [x[start:stop].to(wide) for start, stop in bucket.layout.runs]
    packed = torch.cat(runs) if runs else x[:0].to(wide)
    if not bucket.finite:  # so that every rank learns of it
        packed = torch.full_like(packed, float("nan"))
    return contiguous(bucket.layout), packed


def _unpacked(flat: Tensor, layout: Layout) -> Tensor:
    out = torch.zeros(layout.numel, dtype=flat.dtype, device=flat.device)
    for (start, stop), part in zip(layout.runs, _by_run(flat, layout), strict=True):
        out[start:stop] = part
    return out


def _parts(flat: Tensor, layout: Layout) -> Parts:
    pieces = zip(layout.runs, _by_run(flat, layout), strict=True)
    return Parts(tuple((start, Dense(part)) for (start, _), part in pieces), layout.numel)


def _by_run(flat: Tensor, layout: Layout) -> list[Tensor]:
    return list(flat.split([stop - start for start, stop in layout.runs])) if layout.runs else []


def _votes(names: Collection[str], layout: Layout, node: Pairwise, x: Tensor) -> Tensor:
    """Which parameters each rank of the node names: (ranks, parameters)."""
    named = [slot.name in names for slot in layout.slots]
    flags = torch.tensor(named, dtype=torch.uint8, device=x.device)
    return torch.stack(node.all_gather(flags, [len(named)] * node.size))


def _voted(votes: Tensor, layout: Layout) -> tuple[str, ...]:
    slots = zip(layout.slots, votes.tolist(), strict=True)
    return tuple(slot.name for slot, vote in slots if vote)
