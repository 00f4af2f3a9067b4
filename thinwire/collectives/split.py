"""Split and reduce: every rank owns a region of the bucket and sums what all send for it.

    1. each rank sends the owner of every region its entries there    (all-to-all)
    2. owners add them up
    3. everybody gets all sums                                        (all-gather)

Nothing is dropped, so my share is what I sent; an owner also answers for what the wire rounds off
its sums. Where the sums have filled up, sending them dense is cheaper, and that is done: TopkDSA,
after SparCML's split all-gather (Renggli et al., SC 2019, arXiv 1802.08021).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor

from thinwire.comm.metered import COUNT
from thinwire.payload import Dense, Sparse, together
from thinwire.protocols import Traffic
from thinwire.state import State
from thinwire.wire import Wire
from thinwire.wire.link import Link


@dataclass(frozen=True, kw_only=True)
class SplitReduce:
    """Equal regions; sums are sent dense once they would take more bytes as pairs."""

    ragged: ClassVar[bool] = True
    keeps: ClassVar[str] = "sender"

    def sum(
        self, mine: Sparse, k: int, step: int, link: Link, state: State
    ) -> tuple[Sparse | Dense, Sparse]:
        world = link.comm.size
        cuts = regions(mine.numel, world)
        parts = [link.rounded(part) for part in split(mine, cuts)]
        reduced = _added(link.all_to_all(parts))
        told = torch.tensor([reduced.entries], device=mine.indices.device)
        counts = [int(count) for count in link.comm.all_gather(told, [1] * world)]
        share = together(parts, mine.numel)
        lengths = [b - a for a, b in pairwise(cuts)]
        if dense_is_cheaper(counts, lengths, link.wire, mine.values.element_size()):
            return _gathered_dense(reduced, share, cuts, lengths, link)
        rounded = link.rounded(reduced)
        total = together(link.gather_counted(rounded, counts), mine.numel)
        return total, _with_error(share, reduced, rounded)

    def traffic(self, k: int, n: int, world: int, wire: Wire) -> Traffic:
        """If every rank chose at random: owners then hold (1 - (1 - k/n)^P) of their region."""
        if n == 0:
            return Traffic(rounds=3, bytes=2 * (world - 1) * (COUNT + wire.nbytes(0)))
        part = wire.nbytes(round(k / world))
        owned = round(n / world * (1 - (1 - k / n) ** world))
        second = min(wire.nbytes(owned), wire.values.nbytes(round(n / world)))
        return Traffic(rounds=3, bytes=(world - 1) * (part + second + 2 * COUNT))


def regions(n: int, world: int) -> list[int]:
    """Where regions begin and end: equal to one entry."""
    return [n * r // world for r in range(world + 1)]


def split(mine: Sparse, cuts: list[int]) -> list[Sparse]:
    """My entries by region."""
    order = torch.argsort(mine.indices)
    indices, values = mine.indices[order], mine.values[order]
    edges = torch.searchsorted(indices, torch.tensor(cuts, device=indices.device)).tolist()
    return [Sparse(indices[a:b], values[a:b], mine.numel) for a, b in pairwise(edges)]


def dense_is_cheaper(counts: list[int], lengths: list[int], wire: Wire, itemsize: int) -> bool:
    """Whether the sums take fewer bytes without indices, zeros and all."""
    pairs = sum(wire.nbytes(count, itemsize) for count in counts)
    return sum(wire.values.nbytes(n, itemsize) for n in lengths) < pairs


def _added(parts: list[Sparse]) -> Sparse:
    """One entry an index, ascending."""
    everything = together(parts, parts[0].numel)
    indices, place = everything.indices.unique(return_inverse=True)
    values = torch.zeros(indices.numel(), dtype=everything.values.dtype, device=indices.device)
    return Sparse(indices, values.index_add_(0, place, everything.values), everything.numel)


def _gathered_dense(
    reduced: Sparse, share: Sparse, cuts: list[int], lengths: list[int], link: Link
) -> tuple[Dense, Sparse]:
    rank = link.comm.rank
    mine = torch.zeros(lengths[rank], dtype=reduced.values.dtype, device=reduced.values.device)
    mine[reduced.indices - cuts[rank]] = reduced.values
    parts = link.gather_dense(mine, lengths)
    error: Tensor = parts[rank] - mine
    where = error.nonzero().reshape(-1)
    off = Sparse(where + cuts[rank], error[where], reduced.numel)
    return Dense(torch.cat(parts)), together([share, off], reduced.numel)


def _with_error(share: Sparse, exact: Sparse, rounded: Sparse) -> Sparse:
    """My share, and what the wire made of the sums I own."""
    error = rounded.values - exact.values
    off = error != 0
    return together([share, Sparse(exact.indices[off], error[off], exact.numel)], exact.numel)
