"""The mean of everyone's numbers in a code that rounds: coded chunks to their owners, and back.

Rank r averages the r-th chunk. Every other rank sends it that chunk in code; r adds up exactly,
encodes the mean and sends it to everybody. Both ways messages are made and taken one at a time
(`Comm.trade`), so that codes are computed while other messages travel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from thinwire import scratch
from thinwire.comm.metered import all_reduced, gathered
from thinwire.operand import Sum, evaluate
from thinwire.payload import Dense, Parts, Payload
from thinwire.protocols import Comm, Traffic
from thinwire.wire import Wire
from thinwire.wire.blocks import cut
from thinwire.wire.packing import Ends, ends_within
from thinwire.wire.values import ValueCodec


@dataclass(frozen=True)
class Chunk:
    """The numbers that one rank averages, and their code."""

    start: int
    stop: int
    codec: ValueCodec

    def nbytes(self, itemsize: int) -> int:
        return self.codec.nbytes(self.stop - self.start, itemsize)

    def of(self, x: Tensor) -> Tensor:
        return x[self.start : self.stop]

    def encode(self, x: Tensor, salt: str, width: int) -> Tensor:
        """These numbers as bytes, filled up to the width of the longest chunk."""
        data = scratch.empty(width, torch.uint8, x.device)
        used = self.nbytes(x.element_size())
        self.codec.encode(x, salt, data[:used])
        data[used:] = 0
        return data

    def decode_into(self, out: Tensor, data: Tensor, alpha: float | None = None) -> Tensor:
        """The numbers in place of what `out` holds, or times alpha added to it."""
        used = self.nbytes(out.element_size())
        return self.codec.decode(data[:used], self.stop - self.start, out.dtype, out, alpha)


@dataclass(frozen=True)
class Coded:
    """Numbers as they were sent: decoded anew wherever they are added."""

    chunk: Chunk
    data: Tensor

    @property
    def numel(self) -> int:
        return self.chunk.stop - self.chunk.start

    @property
    def entries(self) -> int:
        return self.numel

    def add_into(self, out: Tensor, alpha: float = 1.0) -> Tensor:
        return self.chunk.decode_into(out, self.data, alpha)


def average(
    x: Tensor | Sum, out: Tensor, comm: Comm, codec: ValueCodec, sizes: Sequence[int],
    salt: Callable[[int], str], note: Tensor, poison: Callable[[Tensor], Tensor],
) -> tuple[Payload, list[Tensor]]:  # fmt: skip
    """The mean of everyone's x into `out`; my share of it, and everyone's notes.

    My share is what I sent, decoded. Of my own chunk, which need not travel, it is x and the
    second rounding, P x (re-encoded mean - exact mean), so that the shares still add up to the
    mean. Rounded before too, it would feed two errors back every step instead of one.

    `out` may be where x lies, or what is still to be added to it. `poison` turns the mean of my
    chunk into NaN where this rank cannot take the step; everybody sees that. `salt(rank)` names the
    message to a rank; the one that goes to everybody is the one to myself.
    """
    world, mine = comm.size, comm.rank
    chunks = cut_chunks(codec, out.numel(), world, tuple(sizes))
    width = max(chunk.nbytes(out.element_size()) for chunk in chunks)
    own, sent, got = chunks[mine], dict[int, Tensor](), dict[int, Tensor]()
    if own.start == own.stop:  # who averages nothing can tell only by what it sends
        x = poison(evaluate(x))

    def send(to: int) -> Tensor:
        sent[to] = chunks[to].encode(_take(x, chunks[to], out), salt(to), width)
        return sent[to]

    comm.trade(width, send, got.__setitem__)
    local = _take(x, own, out)
    exact = scratch.empty(local.numel(), local.dtype, local.device)
    torch.div(local, world, out=exact)
    for rank in sorted(got):
        own.decode_into(exact, got.pop(rank), 1.0 / world)
    exact = poison(exact)
    data = own.encode(exact, salt(mine), width)
    if local.data_ptr() == own.of(out).data_ptr():
        local = scratch.empty(local.numel(), local.dtype, local.device).copy_(local)
    mean = own.decode_into(own.of(out), data)
    share = torch.add(local, torch.sub(mean, exact, out=exact), alpha=world, out=exact)
    message, notes = torch.cat([data, note]) if note.numel() else data, [note]

    def take(source: int, message: Tensor) -> None:
        chunks[source].decode_into(chunks[source].of(out), message)
        notes.append(message[width:])

    comm.trade(message.numel(), lambda to: message, take)
    parts: dict[int, Payload] = {chunks[to].start: Coded(chunks[to], sent[to]) for to in sent}
    parts[own.start] = Dense(share)
    return Parts(tuple(sorted(parts.items())), out.numel()), notes


def reduce_traffic(
    n: int, world: int, wire: Wire, itemsize: int = 4, sizes: Sequence[int] = ()
) -> Traffic:
    """What `Link.all_reduce` of n numbers sends."""
    if n == 0:
        return Traffic()
    if wire.values.exact:
        return Traffic(rounds=1, bytes=all_reduced(n * itemsize, world))
    chunks = cut_chunks(wire.values, n, world, tuple(sizes))
    width = max(chunk.nbytes(itemsize) for chunk in chunks)
    return Traffic(rounds=2, bytes=(world - 1) * width + gathered(width, world))


def cut_chunks(codec: ValueCodec, n: int, world: int, sizes: tuple[int, ...]) -> list[Chunk]:
    """Which of n numbers each rank averages, and the code of these."""
    return [Chunk(start, stop, cut(codec, ends)) for start, stop, ends in _cuts(n, world, sizes)]


@lru_cache(maxsize=1024)
def _cuts(n: int, world: int, sizes: tuple[int, ...]) -> list[tuple[int, int, Ends]]:
    """Where chunks begin and end, and where parameters end in each."""
    ends = tuple(accumulate(sizes)) or (n,)
    assert ends[-1] == n, "sizes are of all the numbers there are"
    edges = [min(n, rank * -(-n // world)) for rank in range(world + 1)]
    return [(start, stop, ends_within(ends, start, stop)) for start, stop in pairwise(edges)]


def _take(x: Tensor | Sum, chunk: Chunk, like: Tensor) -> Tensor:
    """The chunk's numbers, in the precision of the mean; of a sum, added now."""
    taken = x.take_run(chunk.start, chunk.stop) if isinstance(x, Sum) else chunk.of(x)
    return taken.to(like.dtype)
