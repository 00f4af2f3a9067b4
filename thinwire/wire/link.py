"""A comm that speaks payloads: collectives above it never see bytes.

`note` is a short fixed-length message that rides on the first payload that reaches everybody:
one bit a parameter, set if this rank had a gradient for it. `heard()` is the union.
"""

from __future__ import annotations

from bisect import bisect_left

import torch
from torch import Tensor

from thinwire.comm.metered import all_reduced, gathered
from thinwire.operand import working_dtype
from thinwire.payload import Sparse
from thinwire.protocols import Comm, Traffic
from thinwire.wire import Wire


class Link:
    """Comm plus wire, for one reduction; `salt` names it, for codes that round at random."""

    def __init__(self, comm: Comm, wire: Wire, note: Tensor | None = None, salt: str = "") -> None:
        self.comm, self.wire, self._note, self._salt = comm, wire, note, salt
        self._heard: Tensor | None = None
        self._messages = 0
        self._encoded: list[tuple[Tensor, Tensor]] = []  # rounded values, and their bytes

    def rounded(self, mine: Sparse, shared: str | None = None) -> Sparse:
        """What the others will read: the values after the wire's round trip.

        Ranks that hold the same numbers and must round them alike name the message (`shared`).
        """
        codec = self.wire.values
        if codec.exact:
            return mine
        if shared is None:
            message = self._encode(mine.values)
        else:
            message = codec.encode(mine.values, f"{self._salt.rpartition('/')[0]}/{shared}")
        values = codec.decode(message, mine.entries, mine.values.dtype)
        self._encoded.append((values, message))
        return Sparse(mine.indices, values, mine.numel)

    def all_gather(self, mine: Sparse, *, ragged: bool) -> list[Sparse]:
        """Everyone's payload, in rank order."""
        message = self._with_note(self._message(mine))
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

    def all_to_all(self, parts: list[Sparse]) -> list[Sparse]:
        """The r-th part to rank r; what each rank has for me, in rank order."""
        got = self.comm.all_to_all([self._message(part) for part in parts])
        return [self._decode(message, parts[0]) for message in got]

    def gather_counted(self, mine: Sparse, counts: list[int]) -> list[Sparse]:
        """Everyone's payload, whose numbers of entries are known to all."""
        itemsize = mine.values.element_size()
        sizes = [self.wire.nbytes(count, itemsize) for count in counts]
        got = self.comm.all_gather(self._message(mine), sizes)
        return [self._decode(message, mine) for message in got]

    def gather_dense(self, mine: Tensor, sizes: list[int]) -> list[Tensor]:
        """Everyone's numbers, so many each."""
        codec = self.wire.values
        widths = [codec.nbytes(n, mine.element_size()) for n in sizes]
        got = self.comm.all_gather(self._encode(mine), widths)
        return [codec.decode(part, n, mine.dtype) for part, n in zip(got, sizes, strict=True)]

    def send(self, mine: Sparse, to: int, entries: int | None) -> None:
        """Mine to that rank, which knows of how many entries, or is told."""
        self.comm.exchange(self._message(mine), to, None, None if entries is None else 0)

    def receive(self, source: int, like: Sparse, entries: int | None) -> Sparse:
        """A payload from that rank; of so many entries, if that is known."""
        return self._swapped(None, source, like, entries)

    def swap(self, mine: Sparse, partner: int, entries: int | None) -> Sparse:
        """My payload for the partner's."""
        return self._swapped(partner, partner, mine, entries)

    def _swapped(self, to: int | None, source: int, mine: Sparse, entries: int | None) -> Sparse:
        message = self._message(mine) if to is not None else self._no_message(mine)
        size = None
        if entries is not None:
            size = self.wire.nbytes(entries, mine.values.element_size())
        got = self.comm.exchange(message, to, source, size)
        assert got is not None
        return self._decode(got, mine)

    def highest(self, votes: Tensor) -> Tensor:
        """The largest vote of any rank, place by place; as many votes on every rank."""
        everyone = self.comm.all_gather(votes, [votes.numel()] * self.comm.size)
        return torch.stack(everyone).amax(dim=0)

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
        sent = [self._encode(part) for part in padded.split(chunk)] if chunk else []
        if not sent:
            return x, x
        width = sent[0].numel()
        exact = x.new_zeros(chunk)
        for part in self.comm.all_to_all(sent, [width] * world):
            exact.add_(codec.decode(part, chunk, x.dtype), alpha=1.0 / world)
        exact[max(0, x.numel() - self.comm.rank * chunk) :] = 0.0  # what rounding made of padding
        message = self._with_note(self._encode(exact))
        parts = self.comm.all_gather(message, [message.numel()] * world)
        means = [codec.decode(self._without_note(part), chunk, x.dtype) for part in parts]
        shares = [codec.decode(part, chunk, x.dtype) for part in sent]
        mine = self.comm.rank
        shares[mine] = shares[mine] + (means[mine] - exact) * world
        n = x.numel()
        return torch.cat(means)[:n], torch.cat(shares)[:n]

    def _message(self, mine: Sparse) -> Tensor:
        indices = self.wire.indices.encode(mine.indices, mine.numel)
        return torch.cat([self._encode(mine.values), indices])

    @staticmethod
    def _no_message(like: Sparse) -> Tensor:
        return torch.empty(0, dtype=torch.uint8, device=like.values.device)

    def _decode(self, message: Tensor, mine: Sparse) -> Sparse:
        k = self._pairs(message.numel(), mine.values.element_size())
        cut = self.wire.values.nbytes(k, mine.values.element_size())
        values = self.wire.values.decode(message[:cut], k, mine.values.dtype)
        indices = self.wire.indices.decode(message[cut:], k, mine.numel)
        return Sparse(indices, values, mine.numel)

    def _encode(self, values: Tensor) -> Tensor:
        """The bytes of these values; of values rounded before, the very bytes they came from."""
        for known, message in self._encoded:
            if known is values:
                return message
        self._messages += 1
        return self.wire.values.encode(values, f"{self._salt}/{self._messages}")

    def _pairs(self, size: int, itemsize: int) -> int:
        """How many pairs a message of this size holds: every pair makes it longer."""
        return bisect_left(range(size), size, key=lambda k: self.wire.nbytes(k, itemsize))

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
