"""Hybrid transport: each tensor's entries go dense or sparse, whichever sends less.

A sparse gather sends everybody's pairs to everybody, a dense all-reduce two numbers an entry
however many ranks there are: with more ranks, or a higher density, dense wins. The sum is the same
either way. By `price` the number of pairs is taken from the density; by `fill` from what the last
step gathered, so that an embedding of which few rows are used is seen as sparse as it is.
ADTopk's hybrid communication (HPDC 2024, doi 10.1145/3625549.3658678), decided per tensor.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from thinwire.collectives.gather import AllGather
from thinwire.comm.metered import COUNT, all_reduced
from thinwire.layout import Slot
from thinwire.payload import Parts, Payload, Sparse, only, together
from thinwire.protocols import Collective, Traffic
from thinwire.state import State
from thinwire.wire import Wire
from thinwire.wire.link import Link, reduce_traffic


@dataclass(frozen=True, kw_only=True)
class Cheapest:
    """Per tensor a dense all-reduce, or the `sparse` collective for all the others together."""

    sparse: Collective = field(default_factory=lambda: AllGather(ragged=True))
    by: str = "price"
    ragged: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.by not in ("price", "fill"):
            raise ValueError(f"by must be 'price' or 'fill', got {self.by!r}")
        if not getattr(self.sparse, "ragged", True):
            raise ValueError(
                f"parts of a bucket have varying counts, got {self.sparse!r}; use "
                "AllGather(ragged=True)"
            )

    @property
    def keeps(self) -> str:
        return str(getattr(self.sparse, "keeps", "sender"))

    def sum(
        self, mine: Sparse, k: int, step: int, link: Link, state: State
    ) -> tuple[Sparse, Payload]:
        slots, world = state.layout.slots, link.comm.size
        seen = state.get("pairs") if self.by == "fill" else None
        asked = k / max(1, state.layout.size)
        each = [slot.numel * asked for slot in slots] if seen is None else [n / world for n in seen]
        dense = [
            slot
            for slot, pairs in zip(slots, each, strict=True)
            if self._dense_pays(slot.numel, pairs, world, link.wire)
        ]
        inside = within(mine.indices, dense)
        totals: list[Sparse] = []
        shares: list[tuple[int, Payload]] = []
        counted: dict[str, int] = {}
        if dense:
            chosen = only(mine, inside)
            total, share = _summed_dense(chosen, dense, link)
            counted = _counted(chosen, dense, link) if self.by == "fill" else {}
            totals.append(total)
            shares.append((0, share))
        if len(dense) < len(slots) or not slots:
            rest = round(k - asked * sum(slot.numel for slot in dense))
            found, rest_share = self.sparse.sum(
                only(mine, ~inside), max(1, rest), step, link, state
            )
            totals.append(found if isinstance(found, Sparse) else _pairs(found.values))
            shares.append((0, rest_share))
        both = together(totals, mine.numel)
        if self.by == "fill" and bool(both.values.isfinite().all()):
            state["pairs"] = [
                counted.get(slot.name, int(within(both.indices, [slot]).sum())) for slot in slots
            ]
        return both, Parts(tuple(shares), mine.numel)

    def traffic(self, k: int, n: int, world: int, wire: Wire, step: int = 0) -> Traffic:
        """Of a bucket that is one tensor; a bucket of several sends at most this."""
        if not self._dense_pays(n, k, world, wire):
            return self.sparse.traffic(k, n, world, wire, step)
        dense = reduce_traffic(n, world, wire)
        if self.by == "price":
            return dense
        return dense + Traffic(rounds=1, bytes=all_reduced(COUNT, world))

    def _dense_pays(self, n: int, k: float, world: int, wire: Wire) -> bool:
        """Whether n numbers all-reduced are fewer bytes than k entries of every rank, merged."""
        if n == 0 or not wire.values.keeps_zero:
            return False
        pairs, none = (self.sparse.traffic(count, n, world, wire, 1) for count in (round(k), 0))
        return reduce_traffic(n, world, wire).bytes < pairs.bytes - none.bytes


def within(indices: Tensor, slots: list[Slot]) -> Tensor:
    """Which of them lie in one of these slots."""
    inside = torch.zeros(indices.numel(), dtype=torch.bool, device=indices.device)
    for slot in slots:
        inside |= (indices >= slot.offset) & (indices < slot.offset + slot.numel)
    return inside


def _summed_dense(mine: Sparse, slots: list[Slot], link: Link) -> tuple[Sparse, Sparse]:
    """The chosen entries of these tensors, all-reduced with the zeros between them."""
    full = torch.zeros(mine.numel, dtype=mine.values.dtype, device=mine.values.device)
    full[mine.indices] = mine.values
    where = torch.cat([
        torch.arange(slot.offset, slot.offset + slot.numel, device=full.device) for slot in slots
    ])  # fmt: skip
    mean, share = link.all_reduce(full[where])
    total = Sparse(where, mean * link.comm.size, mine.numel)
    return _off_zero(total), _off_zero(Sparse(where, share, mine.numel))


def _counted(mine: Sparse, slots: list[Slot], link: Link) -> dict[str, int]:
    """How many entries of each tensor all ranks had: pairs that a gather would take."""
    own = [int(within(mine.indices, [slot]).sum()) for slot in slots]
    link.phase("count")
    told = link.comm.all_reduce(torch.tensor(own, device=mine.indices.device)).tolist()
    return {slot.name: count for slot, count in zip(slots, told, strict=True)}


def _off_zero(payload: Sparse) -> Sparse:
    return only(payload, payload.values != 0)


def _pairs(values: Tensor) -> Sparse:
    return _off_zero(
        Sparse(torch.arange(values.numel(), device=values.device), values, values.numel())
    )
