"""A comm that speaks payloads: collectives above it never see bytes.

`note` is a short fixed-length message that rides on the first payload that reaches everybody:
one bit a parameter, set if this rank had a gradient for it. `heard()` is the union.
"""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.comm.metered import all_reduced, gathered
from thinwire.operand import working_dtype
from thinwire.payload import Sparse
from thinwire.protocols import Comm, Traffic
from thinwire.wire import Wire


class Link:
    """Comm plus wire, for one reduction."""

    def __init__(self, comm: Comm, wire: Wire, note: Tensor | None = None) -> None:
        self.comm, self.wire, self._note = comm, wire, note
        self._heard: Tensor | None = None

    def rounded(self, mine: Sparse) -> Sparse:
        """What the others will read: the values after the wire's round trip."""
        codec = self.wire.values
        if codec.exact:
            return mine
        values = codec.decode(codec.encode(mine.values), mine.entries, mine.values.dtype)
        return Sparse(mine.indices, values, mine.numel)

    def all_gather(self, mine: Sparse, *, ragged: bool) -> list[Sparse]:
        """Everyone's payload, in rank order."""
        values = self.wire.values.encode(mine.values)
        message = torch.cat([values, self.wire.indices.encode(mine.indices, mine.numel)])
        message = self._with_note(message)
        sizes = None if ragged else [message.numel()] * self.comm.size
        parts = [self._without_note(part) for part in self.comm.all_gather(message, sizes)]
        return [self._decode(part, mine) for part in parts]

    def all_reduce(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The mean of everyone's x, and my share of it (x, less what the wire rounds away)."""
        if not self.wire.values.exact:
            return self._reduce_decoded(x)
        # Weighting first is what DDP does: same bits, and the sum cannot overflow.
        mean = x * (1.0 / self.comm.size)
        if self._note is None:
            return self.comm.all_reduce(mean), x
        both = self.comm.all_reduce(torch.cat([mean, self._note.to(mean.dtype)]))
        self._heard = both[x.numel() :] > 0
        return both[: x.numel()], x

    def heard(self) -> Tensor | None:
        """Which parameters any rank had a gradient for, or None where nobody keeps track."""
        if self._note is not None and self._heard is None:
            notes = self.comm.all_gather(self._note, [self._note.numel()] * self.comm.size)
            self._heard = torch.stack(notes).any(dim=0)
        return self._heard

    def _reduce_decoded(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """All-to-all of encoded chunks, exact sum, re-encode, all-gather.

        My share is what I sent, decoded; the owner of a chunk also takes on its second rounding,
        P x (re-encoded mean - exact mean), so that the shares still add up to the mean.
        """
        codec, world = self.wire.values, self.comm.size
        x = x.to(working_dtype(x.dtype))
        chunk = -(-x.numel() // world)
        padded = torch.cat([x, x.new_zeros(chunk * world - x.numel())])
        sent = [codec.encode(part) for part in padded.split(chunk)] if chunk else []
        if not sent:
            return x, x
        width = sent[0].numel()
        exact = x.new_zeros(chunk)
        for part in self.comm.all_to_all(sent, [width] * world):
            exact.add_(codec.decode(part, chunk, x.dtype), alpha=1.0 / world)
        message = self._with_note(codec.encode(exact))
        parts = self.comm.all_gather(message, [message.numel()] * world)
        means = [codec.decode(self._without_note(part), chunk, x.dtype) for part in parts]
        shares = [codec.decode(part, chunk, x.dtype) for part in sent]
        mine = self.comm.rank
        shares[mine] = shares[mine] + (means[mine] - exact) * world
        n = x.numel()
        return torch.cat(means)[:n], torch.cat(shares)[:n]

    def _decode(self, message: Tensor, mine: Sparse) -> Sparse:
        k = self._pairs(message.numel(), mine.values.element_size())
        cut = self.wire.values.nbytes(k, mine.values.element_size())
        values = self.wire.values.decode(message[:cut], k, mine.values.dtype)
        indices = self.wire.indices.decode(message[cut:], k, mine.numel)
        return Sparse(indices, values, mine.numel)

    def _pairs(self, size: int, itemsize: int) -> int:
        """How many pairs a message of this size holds: `nbytes` is linear in k."""
        empty = self.wire.nbytes(0, itemsize)
        return (size - empty) // (self.wire.nbytes(1, itemsize) - empty)

    def _with_note(self, message: Tensor) -> Tensor:
        return message if self._note is None else torch.cat([message, self._note])

    def _without_note(self, message: Tensor) -> Tensor:
        if self._note is None:
            return message
        cut = message.numel() - self._note.numel()
        note = message[cut:] > 0
        self._heard = note if self._heard is None else self._heard | note
        return message[:cut]


def reduce_traffic(n: int, world: int, wire: Wire, itemsize: int = 4) -> Traffic:
    """What `Link.all_reduce` of n numbers sends."""
    if n == 0:
        return Traffic()
    if wire.values.exact:
        return Traffic(rounds=1, bytes=all_reduced(n * itemsize, world))
    chunk = wire.values.nbytes(-(-n // world), itemsize)
    return Traffic(rounds=2, bytes=(world - 1) * chunk + gathered(chunk, world))
