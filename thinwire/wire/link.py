"""A comm that speaks payloads: collectives above it never see bytes.

`note` is a short fixed-length message that rides on the first payload that reaches everybody:
one bit a parameter, set if this rank had a gradient for it. `read_notes()` is the union.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad

from thinwire.comm.metered import all_reduced, gathered, mark
from thinwire.comm.pairwise import Pairwise
from thinwire.operand import working_dtype
from thinwire.payload import Sparse
from thinwire.protocols import Comm, Traffic
from thinwire.wire import Span, Wire
from thinwire.wire.blocks import cut
from thinwire.wire.packing import Ends, ends_within
from thinwire.wire.slot import fit, slot, unslot
from thinwire.wire.values import ValueCodec

Chunk = tuple[int, ValueCodec]  # how many numbers, and their code


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

    def all_reduce(self, x: Tensor, sizes: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
        """The mean of everyone's x, and my share of it (x, less what the wire rounds away).

        `sizes` says how many numbers are of each parameter: no two share a block's scale.
        """
        self.phase("average")
        if not self.wire.values.exact:
            return self._reduce_decoded(x, sizes)
        # Weighting first is what DDP does: same bits, and the sum cannot overflow.
        mean = x * (1.0 / self.comm.size)
        if self._note is None:
            return self.comm.all_reduce(mean), x
        both = self.comm.all_reduce(torch.cat([mean, self._note.to(mean.dtype)]))
        self._heard = both[x.numel() :] > 0
        return both[: x.numel()], x

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

    def _reduce_decoded(self, x: Tensor, sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
        """All-to-all of encoded chunks, exact sum, re-encode, all-gather.

        My share is what I sent, decoded. Of my own chunk, which need not travel, it is x and the
        second rounding, P x (re-encoded mean - exact mean), so that the shares still add up to the
        mean. Rounded before too, it would feed two errors back every step instead of one.
        """
        world, mine = self.comm.size, self.comm.rank
        x = x.to(working_dtype(x.dtype))
        if not x.numel():
            return x, x
        chunks = _chunks(self.wire.values, x.numel(), world, sizes)
        width = _width(chunks, x.element_size())
        parts = x.split([n for n, _ in chunks])
        own, codec = parts[mine], chunks[mine][1]
        sent = [
            self._chunk(part, code, width) if part is not own else self._nothing(x)
            for part, (_, code) in zip(parts, chunks, strict=True)
        ]
        got = self.comm.all_to_all(sent, [width * (rank != mine) for rank in range(world)])
        exact = own / world
        for rank, data in enumerate(got):
            if rank != mine:
                exact.add_(_decode(data, chunks[mine], x), alpha=1.0 / world)
        data = self._with_note(self._chunk(exact, codec, width))
        everyone = map(self._without_note, self.comm.all_gather(data, [data.numel()] * world))
        means = [_decode(part, of, x) for part, of in zip(everyone, chunks, strict=True)]
        shares = [
            _decode(data, of, x) if data.numel() else own
            for data, of in zip(sent, chunks, strict=True)
        ]
        shares[mine] = own + (means[mine] - exact) * world
        return torch.cat(means), torch.cat(shares)

    def _chunk(self, values: Tensor, codec: ValueCodec, width: int) -> Tensor:
        """The bytes of a chunk, filled up to the width of the longest."""
        self._messages += 1
        data = codec.encode(values, f"{self._salt}/{self._messages}")
        return pad(data, (0, width - data.numel()))

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


def _decode(data: Tensor, chunk: Chunk, like: Tensor) -> Tensor:
    n, codec = chunk
    return codec.decode(data[: codec.nbytes(n, like.element_size())], n, like.dtype)


def _chunks(codec: ValueCodec, n: int, world: int, sizes: Sequence[int]) -> list[Chunk]:
    """How many of n numbers each rank averages, and the code of these."""
    return [(size, cut(codec, ends)) for size, ends in _cuts(n, world, tuple(sizes))]


@lru_cache(maxsize=1024)
def _cuts(n: int, world: int, sizes: tuple[int, ...]) -> list[tuple[int, Ends]]:
    """How many of n numbers each rank averages, and where parameters end in these."""
    ends = tuple(accumulate(sizes)) or (n,)
    assert ends[-1] == n, "sizes are of all the numbers there are"
    edges = [min(n, rank * -(-n // world)) for rank in range(world + 1)]
    return [(stop - start, ends_within(ends, start, stop)) for start, stop in pairwise(edges)]


def _width(chunks: list[Chunk], itemsize: int) -> int:
    """Bytes of the longest chunk: all are as long, so that every rank sends as much."""
    return max(codec.nbytes(n, itemsize) for n, codec in chunks)


def reduce_traffic(
    n: int, world: int, wire: Wire, itemsize: int = 4, sizes: Sequence[int] = ()
) -> Traffic:
    """What `Link.all_reduce` of n numbers sends."""
    if n == 0:
        return Traffic()
    if wire.values.exact:
        return Traffic(rounds=1, bytes=all_reduced(n * itemsize, world))
    width = _width(_chunks(wire.values, n, world, sizes), itemsize)
    return Traffic(rounds=2, bytes=(world - 1) * width + gathered(width, world))
