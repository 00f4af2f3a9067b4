"""A comm that speaks payloads: collectives above it never see bytes.

`note` is a short fixed-length message that rides on the first payload that reaches everybody:
one bit a parameter, set if this rank had a gradient for it. `read_notes()` is the union.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from thinwire.comm.metered import mark
from thinwire.comm.pairwise import Pairwise
from thinwire.operand import Sum, evaluate, working_dtype
from thinwire.payload import Dense, Payload, Sparse
from thinwire.protocols import Comm
from thinwire.wire import Span, Wire
from thinwire.wire.average import average
from thinwire.wire.slot import fit, slot, unslot


class Link:
    """Comm plus wire, for one reduction; `salt` names it, for codes that round at random."""

    def __init__(self, comm: Comm, wire: Wire, note: Tensor | None = None, salt: str = "") -> None:
        self.comm, self.wire, self._note, self._salt = comm, wire, note, salt
        self._heard: Tensor | None = None
        self._messages = 0
        self._encoded: list[tuple[Tensor, Tensor]] = []  # rounded values, and their bytes

    def phase(self, name: str) -> None:
        """What the algorithm does next, for whoever traces it."""
        mark(self.comm, name)

    def pairwise(self) -> None:
        """From here on with messages between pairs, one after the other."""
        self.comm = Pairwise(self.comm)

    def round(self, mine: Sparse, shared: str | None = None) -> Sparse:
        """What the others will read: the values after the wire's round trip.

        Ranks that hold the same numbers and must round them alike name the message (`shared`).
        """
        codec = self.wire.values
        if codec.exact:
            return mine
        if shared is None:
            data = self._encode(mine.values)
        else:
            data = codec.encode(mine.values, f"{self._salt.rpartition('/')[0]}/{shared}")
        values = codec.decode(data, mine.entries, mine.values.dtype)
        self._encoded.append((values, data))
        return Sparse(mine.indices, values, mine.numel)

    def all_gather(self, mine: Sparse, *, ragged: bool) -> list[Sparse]:
        """Everyone's payload, in rank order; `ragged` if the counts may differ."""
        data = self._with_note(self._message(mine))
        sizes = None if ragged or not self.wire.fixed else [data.numel()] * self.comm.size
        parts = [self._without_note(part) for part in self.comm.all_gather(data, sizes)]
        return [self._read(part, mine) for part in parts]

    def all_reduce(
        self, x: Tensor | Sum, sizes: Sequence[int] = (), out: Tensor | None = None,
        poison: Callable[[Tensor], Tensor] = lambda x: x,
    ) -> tuple[Tensor, Payload]:  # fmt: skip
        """The mean of everyone's x, and my share of it (x, less what the wire rounds away).

        `sizes` says how many numbers are of each parameter: no two share a block's scale. The mean
        is new, or in `out`. `poison` makes NaN of what is sent if this rank cannot take the step.
        """
        self.phase("average")
        if not self.wire.values.exact:
            return self._average_decoded(x, sizes, out, poison)
        if isinstance(x, Sum):
            x = x.take().clone()  # the residual itself, which is cleared before my share is used
        # Weighting first is what DDP does: same bits, and the sum cannot overflow.
        mean = poison(x) * (1.0 / self.comm.size)
        if self._note is None:
            return self.comm.all_reduce(mean), Dense(x)
        both = self.comm.all_reduce(torch.cat([mean, self._note.to(mean.dtype)]))
        self._heard = both[x.numel() :] > 0
        return both[: x.numel()], Dense(x)

    def _average_decoded(
        self, x: Tensor | Sum, sizes: Sequence[int], out: Tensor | None,
        poison: Callable[[Tensor], Tensor],
    ) -> tuple[Tensor, Payload]:  # fmt: skip
        if out is None:
            like = evaluate(x)
            out = torch.empty_like(like, dtype=working_dtype(like.dtype))
        if not out.numel():
            return out, Dense(out)
        mine, first = self.comm.rank, self._messages + 1
        self._messages += self.comm.size

        def salt(to: int) -> str:
            number = first + (self.comm.size - 1 if to == mine else to - (to > mine))
            return f"{self._salt}/{number}"

        note = self._nothing(out) if self._note is None else self._note
        share, notes = average(x, out, self.comm, self.wire.values, sizes, salt, note, poison)
        if self._note is not None:
            self._heard = (torch.stack(notes) > 0).any(dim=0)
        return out, share

    def all_to_all(self, parts: list[Sparse], spans: list[Span]) -> list[Sparse]:
        """The r-th part, of the r-th span, to rank r; what each rank has for me, in rank order."""
        data = [self._message(part, span) for part, span in zip(parts, spans, strict=True)]
        own = spans[self.comm.rank]
        return [self._read(got, parts[0], own) for got in self.comm.all_to_all(data)]

    def gather_spans(
        self, mine: Sparse, spans: list[Span], counts: list[int] | None = None
    ) -> list[Sparse]:
        """Everyone's payload of its span; of so many entries each, if that is known."""
        sizes = None
        if self.wire.fixed and counts is not None:
            itemsize = mine.values.element_size()
            lengths = [stop - start for start, stop in spans]
            sizes = [self.wire.nbytes(*one, itemsize) for one in zip(counts, lengths, strict=True)]
        got = self.comm.all_gather(self._message(mine, spans[self.comm.rank]), sizes)
        return [self._read(data, mine, span) for data, span in zip(got, spans, strict=True)]

    def fit(self, mine: Sparse, span: Span, room: int) -> Sparse:
        """As much of it as goes into a slot of so many bytes, rounded as others will read it."""
        return self.round(fit(self.wire, mine, span, room))

    def all_to_all_slots(self, parts: list[Sparse], spans: list[Span], room: int) -> list[Sparse]:
        """As `all_to_all`, of fitted parts, without a word on sizes: all are `room` bytes."""
        data = [
            slot(self._message(part, span), room) for part, span in zip(parts, spans, strict=True)
        ]
        got = self.comm.all_to_all(data, [room] * self.comm.size)
        own = spans[self.comm.rank]
        return [self._read(unslot(part), parts[0], own) for part in got]

    def gather_slots(
        self, mine: Sparse, head: Tensor, spans: list[Span], room: int
    ) -> tuple[list[Sparse], list[Tensor]]:
        """Everyone's fitted payload in slots of `room` bytes, and the heads they came with."""
        filled = slot(self._message(mine, spans[self.comm.rank]), room)
        front = head.view(torch.uint8)
        data = self._with_note(torch.cat([front, filled]))
        got = self.comm.all_gather(data, [data.numel()] * self.comm.size)
        parts = [self._without_note(part) for part in got]
        heads = [part[: front.numel()].clone().view(head.dtype) for part in parts]
        payloads = [
            self._read(unslot(part[front.numel() :]), mine, span)
            for part, span in zip(parts, spans, strict=True)
        ]
        return payloads, heads

    def gather_dense(self, mine: Tensor, sizes: list[int]) -> list[Tensor]:
        """Everyone's numbers, so many each."""
        codec = self.wire.values
        widths = [codec.nbytes(n, mine.element_size()) for n in sizes]
        got = self.comm.all_gather(self._encode(mine), widths)
        return [codec.decode(part, n, mine.dtype) for part, n in zip(got, sizes, strict=True)]

    def send(self, mine: Sparse, to: int, entries: int | None) -> None:
        """Mine to that rank, which knows of how many entries, or is told."""
        size = 0 if entries is not None and self.wire.fixed else None
        self.comm.exchange(self._message(mine), to, None, size)

    def receive(self, source: int, like: Sparse, entries: int | None) -> Sparse:
        """A payload from that rank; of so many entries, if that is known."""
        return self._swap(None, source, like, entries)

    def swap(self, mine: Sparse, partner: int, entries: int | None) -> Sparse:
        """My payload for the partner's."""
        return self._swap(partner, partner, mine, entries)

    def pass_on(self, mine: Sparse, to: int, source: int) -> Sparse:
        """Mine to one rank, and what another has for me; nobody knows how much."""
        got = self.comm.exchange(self._message(mine), to, source)
        assert got is not None
        return self._read(got, mine)

    def _swap(self, to: int | None, source: int, mine: Sparse, entries: int | None) -> Sparse:
        data = self._message(mine) if to is not None else self._nothing(mine.values)
        size = None
        if entries is not None and self.wire.fixed:
            size = self.wire.nbytes(entries, mine.numel, mine.values.element_size())
        got = self.comm.exchange(data, to, source, size)
        assert got is not None
        return self._read(got, mine)

    def highest(self, votes: Tensor) -> Tensor:
        """The largest vote of any rank, place by place; as many votes on every rank."""
        self.phase("vote")
        everyone = self.comm.all_gather(votes, [votes.numel()] * self.comm.size)
        return torch.stack(everyone).amax(dim=0)

    def read_notes(self) -> Tensor | None:
        """Which parameters any rank had a gradient for, or None where nobody keeps track."""
        if self._note is not None and self._heard is None:
            notes = self.comm.all_gather(self._note, [self._note.numel()] * self.comm.size)
            self._heard = torch.stack(notes).any(dim=0)
        return self._heard

    def _message(self, mine: Sparse, span: Span | None = None) -> Tensor:
        return self.wire.write(mine, self._encode(mine.values), span or (0, mine.numel))

    def _read(self, data: Tensor, like: Sparse, span: Span | None = None) -> Sparse:
        return self.wire.read(data, span or (0, like.numel), like)

    @staticmethod
    def _nothing(like: Tensor) -> Tensor:
        return torch.empty(0, dtype=torch.uint8, device=like.device)

    def _encode(self, values: Tensor) -> Tensor:
        """The bytes of these values; of values rounded before, the very bytes they came from."""
        for known, data in self._encoded:
            if known is values:
                return data
        self._messages += 1
        return self.wire.values.encode(values, f"{self._salt}/{self._messages}")

    def _with_note(self, data: Tensor) -> Tensor:
        return data if self._note is None else torch.cat([data, self._note])

    def _without_note(self, data: Tensor) -> Tensor:
        if self._note is None:
            return data
        cut = data.numel() - self._note.numel()
        note = data[cut:] > 0
        self._heard = note if self._heard is None else self._heard | note
        return data[:cut]
