"""gTop-k: the k largest of the sum, found by swapping and re-selecting, O(k log P) a rank.

    for i in 0, 1, ...: swap lists with rank XOR 2^i, add them up, keep the k largest

Each list is the partial sum of a group of 2^i ranks, the same on all of them. The published method
(Shi et al., ICDCS 2019, arXiv 1901.04359) puts back what the end result does not hold, and loses
what was dropped on the way but came back from elsewhere. Here every rank follows its own entries
from hop to hop: what a merge drops is dropped for good and stays with its sender, so the shares
add up to the total. Ranks beyond the largest power of two hand their list to a partner at first,
and get the result, and which of their entries are in it, back in the end.

The paper's own pattern is a tree: lists are merged towards rank 0, which hands the result down.
There who merges keeps what a merge drops; twice the bytes on the busiest rank, half the merging.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from thinwire import kernels
from thinwire.collectives.select import difference, given_up, share, surviving
from thinwire.comm.metered import COUNT
from thinwire.payload import Payload, Sparse, add_up, ascending, largest, only, together
from thinwire.protocols import Traffic
from thinwire.schedule import checked_flag
from thinwire.state import State
from thinwire.wire import Wire
from thinwire.wire.link import Link


@dataclass(frozen=True, kw_only=True)
class GTopK:
    """The k largest entries of the sum, by swapping lists with a partner in log2(P) rounds.

    Args:
        ragged: Whether counts may differ between ranks; they travel too.
        tree: Send up a tree and down again, as in the paper, in place of a butterfly.

    Example:
        >>> GTopK(tree=True).keeps
        'owner'
    """

    ragged: bool = False
    tree: bool = False

    def __post_init__(self) -> None:
        checked_flag("ragged", self.ragged)
        checked_flag("tree", self.tree)

    @property
    def keeps(self) -> str:
        return "owner" if self.tree else "sender"

    def sum(
        self, mine: Sparse, k: int, step: int, link: Link, state: State
    ) -> tuple[Sparse, Payload]:
        mine = link.round(mine)
        if self.tree:
            return through_tree(mine, k, link)
        rank, world = link.comm.rank, link.comm.size
        square = largest_power(world)
        size = None if self.ragged else mine.entries
        link.phase("to host")
        if rank >= square:
            return self._as_guest(mine, rank - square, size, link)
        total, own, guest, theirs = mine, mine, None, None
        corrections = only(mine, mine.indices < 0)  # nothing yet
        if rank + square < world:
            guest = link.receive(rank + square, mine, size)
            total = merge_largest(total, guest, k)
            own, theirs = surviving(own, total), surviving(guest, total)
        hop = 1
        while hop < square:
            if hop > 1 or world > square:  # a partial sum: round it as all of the group do
                total, corrections = self._round(total, corrections, hop, rank, link)
            link.phase(f"hop {hop}")
            total = merge_largest(total, link.swap(total, rank ^ hop, size), k)
            own, corrections = surviving(own, total), surviving(corrections, total)
            if theirs is not None:
                theirs = surviving(theirs, total)
            hop *= 2
        if guest is not None and theirs is not None:
            link.phase("to guest")
            alive = kernels.member(guest.indices, ascending(theirs).indices)
            Link(link.comm, Wire(indices=link.wire.indices)).send(total, rank + square, size)
            link.comm.exchange(alive.to(torch.uint8), rank + square, None, 0)
        return total, share([own], [corrections], mine.numel)

    def traffic(self, k: int, n: int, world: int, wire: Wire, step: int = 0) -> Traffic:
        """Of the busiest rank: one with a partner, where the world is not a power of two."""
        if world == 1:
            return Traffic()
        if self.tree:
            children = (world - 1).bit_length()
            down = Wire(indices=wire.indices).nbytes(k, n) + COUNT
            return Traffic(rounds=2 * children, bytes=children * down)
        square = largest_power(world)
        hops = square.bit_length() - 1
        extra = COUNT if self.ragged or not wire.fixed else 0
        swaps = Traffic(rounds=hops, bytes=hops * (wire.nbytes(k, n) + extra))
        if world == square:
            return swaps
        back = Wire(indices=wire.indices).nbytes(k, n) + k + extra
        return swaps + Traffic(rounds=3, bytes=back)

    @staticmethod
    def _as_guest(mine: Sparse, host: int, size: int | None, link: Link) -> tuple[Sparse, Payload]:
        """My list to the host; the result, unrounded, and which of my entries are in it, back."""
        link.send(mine, host, size)
        plain = Link(link.comm, Wire(indices=link.wire.indices))
        total = plain.receive(host, mine, size)
        flags = torch.empty(0, dtype=torch.uint8, device=mine.values.device)
        alive = link.comm.exchange(flags, None, host, mine.entries)
        assert alive is not None
        return total, only(mine, alive > 0)

    @staticmethod
    def _round(
        total: Sparse, corrections: Sparse, hop: int, rank: int, link: Link
    ) -> tuple[Sparse, Sparse]:
        """What the wire makes of the group's sum; each of its ranks answers for a part of that."""
        rounded = link.round(total, shared=f"hop {hop} of {rank // hop}")
        if rounded is total:
            return total, corrections
        error = difference(rounded, total)
        mine = only(error, error.indices % hop == rank % hop)
        return rounded, together([corrections, mine], total.numel)


def through_tree(mine: Sparse, k: int, link: Link) -> tuple[Sparse, Payload]:
    """Up to rank 0 and down again; lists go up rounded, for which their senders answer."""
    rank, world = link.comm.rank, link.comm.size
    plain = Link(link.comm, Wire(indices=link.wire.indices))
    total, hop = mine, 1
    corrections: list[Sparse] = []
    link.phase("up")
    while hop < world and rank % (2 * hop) == 0:
        if rank + hop < world:
            both = add_up([total, link.receive(rank + hop, mine, None)])
            total = largest(both, k)
            corrections.append(given_up(both, total))
        hop *= 2
    if rank:
        rounded = link.round(total)
        corrections.append(difference(rounded, total))
        link.send(rounded, rank - hop, None)
        link.phase("down")
        total = plain.receive(rank - hop, mine, None)
    link.phase("down")
    while hop > 1:
        hop //= 2
        if rank + hop < world:
            plain.send(total, rank + hop, None)
    return total, share([mine], corrections, mine.numel)


def merge_largest(a: Sparse, b: Sparse, k: int) -> Sparse:
    """The k largest of a + b, ascending by index; both sides of a swap get the same bits."""
    return largest(add_up([a, b]), k)


def largest_power(world: int) -> int:
    """The largest power of two that is not above the number of ranks."""
    return 1 << (world.bit_length() - 1)
