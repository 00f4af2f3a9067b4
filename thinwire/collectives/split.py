"""Split and reduce: every rank owns a region of the bucket and sums what all send for it.

    1. each rank sends the owner of every region its entries there    (all-to-all)
    2. owners add them up
    3. everybody gets all sums                                        (all-gather)

Nothing is dropped, so my share is what I sent; an owner also answers for what the wire rounds off
its sums. Where the sums have filled up, sending them dense is cheaper, and that is done: TopkDSA,
after SparCML's split all-gather (Renggli et al., SC 2019, arXiv 1802.08021).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from thinwire.collectives.select import difference, share
from thinwire.comm.metered import COUNT
from thinwire.layout import regions
from thinwire.payload import Dense, Payload, Sparse, add_up, together
from thinwire.protocols import Traffic
from thinwire.schedule import checked_whole, is_number
from thinwire.state import State
from thinwire.wire import Span, Wire
from thinwire.wire.link import Link

FORMS = ("all_to_all", "pairwise")


@dataclass(frozen=True, kw_only=True)
class SplitReduce:
    """Owners of equal regions add up; sums are sent dense once pairs would take more bytes.

    Args:
        form: "all_to_all", or "pairwise": messages to one rank after the other.

    Example:
        >>> SplitReduce(form="pairwise").keeps
        'sender'
    """

    form: str = "all_to_all"
    ragged: ClassVar[bool] = True
    keeps: ClassVar[str] = "sender"

    def __post_init__(self) -> None:
        check_form(self.form)

    def sum(
        self, mine: Sparse, k: int, step: int, link: Link, state: State
    ) -> tuple[Sparse | Dense, Payload]:
        spans = regions(mine.numel, link.comm.size)
        parts, reduced = split_reduce(mine, spans, link, self.form)
        counts = all_counts(reduced, link)
        if dense_is_cheaper(counts, spans, link.wire, mine.values.element_size()):
            total, error = _gather_dense(reduced, spans, link)
            return total, share(parts, [error], mine.numel)
        rounded = link.round(reduced)
        link.phase("gather")
        both = together(link.gather_spans(rounded, spans, counts), mine.numel)
        return both, share(parts, [difference(rounded, reduced)], mine.numel)

    def traffic(self, k: int, n: int, world: int, wire: Wire, step: int = 0) -> Traffic:
        """If every rank chose at random: owners then hold (1 - (1 - k/n)^P) of their region."""
        length = round(n / world)
        part = wire.nbytes(round(k / world), length)
        owned = round(n / world * (1 - (1 - k / n) ** world)) if n else 0
        sizes = 0 if wire.fixed else COUNT
        second = min(wire.nbytes(owned, length) + sizes, wire.values.nbytes(length))
        turns = world - 1 if self.form == "pairwise" else 1
        return Traffic(rounds=3 * turns, bytes=(world - 1) * (part + second + 2 * COUNT))


def split_reduce(
    mine: Sparse, spans: list[Span], link: Link, form: str
) -> tuple[list[Sparse], Sparse]:
    """What I sent to each owner, rounded, and the sum of what all sent for my region."""
    if form == "pairwise":
        link.pairwise()
    parts = [link.round(part) for part in split(mine, spans)]
    link.phase("split")
    return parts, add_up(link.all_to_all(parts, spans))


def split(mine: Sparse, spans: list[Span]) -> list[Sparse]:
    """My entries by region; they ascend already."""
    cuts = torch.tensor([*(start for start, _ in spans), spans[-1][1]], device=mine.indices.device)
    return cut(mine, torch.searchsorted(mine.indices, cuts).tolist())


def cut(mine: Sparse, edges: list[int]) -> list[Sparse]:
    """My entries from each of these to the next."""
    pairs = itertools.pairwise(edges)
    return [Sparse(mine.indices[a:b], mine.values[a:b], mine.numel) for a, b in pairs]


def all_counts(mine: Sparse, link: Link) -> list[int]:
    """How many entries each rank has."""
    link.phase("count")
    told = torch.tensor([mine.entries], device=mine.indices.device)
    return [int(count) for count in link.comm.all_gather(told, [1] * link.comm.size)]


def dense_is_cheaper(counts: list[int], spans: list[Span], wire: Wire, itemsize: int) -> bool:
    """Whether the sums take fewer bytes without indices, zeros and all."""
    if not wire.values.keeps_zero:  # what nobody sent would come out as something
        return False
    lengths = [stop - start for start, stop in spans]
    pairs = sum(wire.nbytes(*one, itemsize) for one in zip(counts, lengths, strict=True))
    return sum(wire.values.nbytes(n, itemsize) for n in lengths) < pairs


def check_steps(**options: int) -> None:
    for name, value in options.items():
        checked_whole(name, value, 1, "a number of steps")


def check_factors(**options: float) -> None:
    for name, value in options.items():
        if not is_number(value) or not value >= 1:
            raise ValueError(f"{name} must be a factor of at least 1.0, got {value!r}")


def check_form(form: str) -> None:
    if form not in FORMS:
        raise ValueError(f"form must be one of {', '.join(FORMS)}, got {form!r}")


def _gather_dense(reduced: Sparse, spans: list[Span], link: Link) -> tuple[Dense, Sparse]:
    """All sums with the zeros between them, and what the wire made of mine."""
    start, stop = spans[link.comm.rank]
    mine = torch.zeros(stop - start, dtype=reduced.values.dtype, device=reduced.values.device)
    mine[reduced.indices - start] = reduced.values
    link.phase("gather dense")
    parts = link.gather_dense(mine, [b - a for a, b in spans])
    error: Tensor = parts[link.comm.rank] - mine
    where = error.nonzero().reshape(-1)
    return Dense(torch.cat(parts)), Sparse(where + start, error[where], reduced.numel)
