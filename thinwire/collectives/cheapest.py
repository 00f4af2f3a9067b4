"""Hybrid transport: each tensor's entries go dense or sparse, whichever sends less.

A sparse gather sends everybody's pairs to everybody, a dense all-reduce two numbers an entry
however many ranks there are: with more ranks, or a higher density, dense wins. The sum is the same
either way. By `price` the number of pairs is what the density asks of that tensor; by `fill` what
the last step gathered, so that an embedding of which few rows are used is seen as sparse as it is.
ADTopk's hybrid communication (HPDC 2024, doi 10.1145/3625549.3658678), decided per tensor.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from thinwire.collectives.gather import AllGather
from thinwire.comm.metered import COUNT, all_reduced
from thinwire.layout import Slot
from thinwire.payload import Parts, Payload, Sparse, only, together, values_of
from thinwire.protocols import Collective, CollectivePromises, Traffic, promised
from thinwire.state import State
from thinwire.wire import Wire
from thinwire.wire.average import reduce_traffic
from thinwire.wire.link import Link

Counts = tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True)
class Cheapest:
    """Per tensor a dense all-reduce, or a sparse collective for all the others together.

    Args:
        sparse: The collective for those that stay sparse.
        by: "price" compares predicted bytes, "fill" the entries that were really chosen.
        counts: Entries and entries asked for of every tensor. Whoever selects fills it in; without
            it all tensors have the same density.

    Example:
        >>> Cheapest(by="fill").keeps
        'sender'
    """

    sparse: Collective = field(default_factory=lambda: AllGather(ragged=True))
    by: str = "price"
    counts: Counts = ()
    ragged: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.by not in ("price", "fill"):
            raise ValueError(f"by must be 'price' or 'fill', got {self.by!r}")
        if not promised(CollectivePromises, self.sparse).ragged:
            raise ValueError(
                f"parts of a bucket have varying counts, got {self.sparse!r}; use "
                "AllGather(ragged=True)"
            )

    @property
    def keeps(self) -> str:
        return promised(CollectivePromises, self.sparse).keeps

    def sum(
        self, mine: Sparse, k: int, step: int, link: Link, state: State
    ) -> tuple[Sparse, Payload]:
        slots, world = state.layout.slots, link.comm.size
        counts = self.counts or evenly(k, [slot.numel for slot in slots])
        seen = state.get("pairs") if self.by == "fill" else None
        pairs = [n / world for n in seen] if seen is not None else [count for _, count in counts]
        dense, rest = [], 0
        for slot, expected, (_, asked) in zip(slots, pairs, counts, strict=True):
            if self._dense_pays(slot.numel, expected, world, link.wire):
                dense.append(slot)
            else:
                rest += asked
        inside = within(mine.indices, dense)
        totals: list[Sparse] = []
        shares: list[tuple[int, Payload]] = []
        counted: dict[str, int] = {}
        if dense:
            chosen = only(mine, inside)
            total, share = _sum_dense(chosen, dense, link)
            counted = _count_pairs(chosen, dense, link) if self.by == "fill" else {}
            totals.append(total)
            shares.append((0, share))
        if not dense or sum(slot.numel for slot in dense) < state.layout.size:
            others = only(mine, ~inside)
            found, rest_share = self.sparse.sum(others, max(1, rest), step, link, state)
            totals.append(found if isinstance(found, Sparse) else _pairs(found.values))
            shares.append((0, rest_share))
        both = together(totals, mine.numel)
        if self.by == "fill" and bool(both.values.isfinite().all()):
            state["pairs"] = [
                counted.get(slot.name, int(within(both.indices, [slot]).sum())) for slot in slots
            ]
        return both, Parts(tuple(shares), mine.numel)

    def with_counts(self, counts: Counts) -> Cheapest:
        """For tensors of which so many entries are asked for, each."""
        return replace(self, counts=counts)

    def traffic(self, k: int, n: int, world: int, wire: Wire, step: int = 0) -> Traffic:
        """By the counts; of a bucket that is one tensor, if there are none."""
        counts = self.counts or ((n, k),)
        dense = [size for size, asked in counts if self._dense_pays(size, asked, world, wire)]
        rest = [(size, asked) for size, asked in counts
                if size and not self._dense_pays(size, asked, world, wire)]  # fmt: skip
        sent = reduce_traffic(sum(dense), world, wire, sizes=dense)
        if dense and self.by == "fill":
            sent += Traffic(rounds=1, bytes=all_reduced(COUNT * len(dense), world))
        if rest or not dense:
            asked = sum(count for _, count in rest)
            sent += self.sparse.traffic(max(1, asked), n, world, wire, step)
        return sent

    def _dense_pays(self, n: int, k: float, world: int, wire: Wire) -> bool:
        """Whether n numbers all-reduced are fewer bytes than k entries of every rank, merged."""
        if n == 0 or not wire.values.keeps_zero:
            return False
        pairs, none = (self.sparse.traffic(count, n, world, wire, 1) for count in (round(k), 0))
        return reduce_traffic(n, world, wire).bytes < pairs.bytes - none.bytes


def evenly(k: int, sizes: list[int]) -> Counts:
    """k entries over tensors of these sizes, as if all had the same density."""
    return tuple((size, round(k * size / max(1, sum(sizes)))) for size in sizes)


def within(indices: Tensor, slots: list[Slot]) -> Tensor:
    """Which of them lie in one of these slots."""
    inside = torch.zeros(indices.numel(), dtype=torch.bool, device=indices.device)
    for slot in slots:
        inside |= (indices >= slot.offset) & (indices < slot.stop)
    return inside


def _sum_dense(mine: Sparse, slots: list[Slot], link: Link) -> tuple[Sparse, Sparse]:
    """The chosen entries of these tensors, all-reduced with the zeros between them. What was chosen
    stays in the share where rounding made it zero: it was sent, and a memory counts it so."""
    full = torch.zeros(mine.numel, dtype=mine.values.dtype, device=mine.values.device)
    full[mine.indices] = mine.values
    chosen = torch.zeros(mine.numel, dtype=torch.bool, device=mine.values.device)
    chosen[mine.indices] = True
    where = torch.cat([torch.arange(s.offset, s.stop, device=full.device) for s in slots])
    mean, sent = link.all_reduce(full[where], [slot.numel for slot in slots])
    share = values_of(sent, mean)
    mine_of_it = only(Sparse(where, share, mine.numel), (share != 0) | chosen[where])
    return _off_zero(where, mean * link.comm.size, mine.numel), mine_of_it


def _count_pairs(mine: Sparse, slots: list[Slot], link: Link) -> dict[str, int]:
    """How many entries of each tensor all ranks had: pairs that a gather would take."""
    own = [int(within(mine.indices, [slot]).sum()) for slot in slots]
    link.phase("count")
    told = link.comm.all_reduce(torch.tensor(own, device=mine.indices.device)).tolist()
    return {slot.name: count for slot, count in zip(slots, told, strict=True)}


def _pairs(values: Tensor) -> Sparse:
    return _off_zero(torch.arange(values.numel(), device=values.device), values, values.numel())


def _off_zero(indices: Tensor, values: Tensor, numel: int) -> Sparse:
    return only(Sparse(indices, values, numel), values != 0)
