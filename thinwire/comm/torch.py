"""The verbs over a torch process group (gloo, NCCL).

Blocking and always in the caller's order. A `Guard` looks out while a verb waits, so that nobody
sits out the whole time-out behind a lost peer, and says whose fault a broken exchange is.
Sizes that a peer announces are held against `room` before memory is taken for them.

On a CPU large messages go from pair to pair in turns: sent all at once they meet in one receiver's
link and fill 60 % of it, in turns 90 % (docs/performance.md). Small ones do go at once, because
turns wait for one another. All ranks choose alike, by the longest message of all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire import scratch
from thinwire.comm.pairwise import trade_at_once, turns
from thinwire.protocols import WireError

IN_TURNS = 1 << 18  # bytes of the longest message from which on pairs take turns
_PEEK = timedelta(seconds=0.5)
_LARGE = 1 << 62  # beside an announced size: a message of this rank wants turns


class Guard(Protocol):
    """Who looks out while a verb waits for other ranks."""

    def inside(self, waiting: bool) -> None: ...  # raises at the end if it was given up meanwhile

    def look(self) -> None: ...  # raises if what is waited for will not come

    def blame(self, error: RuntimeError) -> None: ...  # raises for whoever broke the exchange


class TorchComm:
    """The verbs over one process group.

    `room` is the largest message in bytes that a peer may announce; `since` is when the verb that
    now waits was entered.
    """

    def __init__(self, group: dist.ProcessGroup, guard: Guard | None = None) -> None:
        self.group, self._guard = group, guard
        self.rank, self.size = group.rank(), group.size()
        self.room: int | None = None
        self.since: float | None = None

    def all_reduce(self, x: Tensor) -> Tensor:
        if self.size > 1 and (x.is_sparse or x.numel()):
            with self._verb():
                self._finish(self.group.allreduce([x]), x)
        return x

    def all_gather(self, x: Tensor, sizes: Sequence[int] | None = None) -> list[Tensor]:
        if self.size == 1:
            return [x]
        with self._verb():
            if sizes is None:
                sizes, _ = self._exchange_sizes([x.numel()] * self.size, x)
            if x.device.type != "cpu":
                return self._gather_padded(x, sizes)
            if _wants_turns(max(sizes), x):
                return self._all_to_all_in_turns([x] * self.size, sizes)
            return self._to_everyone(x, sizes)

    def all_to_all(self, xs: Sequence[Tensor], sizes: Sequence[int] | None = None) -> list[Tensor]:
        if self.size == 1:
            return [xs[0]]
        counts = [x.numel() for x in xs]
        with self._verb():
            if sizes is None:
                sizes, in_turns = self._exchange_sizes(counts, xs[0])
            else:
                in_turns = _wants_turns(max(*counts, *sizes), xs[0])
            if in_turns:
                return self._all_to_all_in_turns(xs, sizes)
            return self._all_to_all(torch.cat(list(xs)), counts, sizes)

    def trade(
        self, size: int, message: Callable[[int], Tensor], take: Callable[[int, Tensor], None]
    ) -> None:
        if self.size == 1:
            return
        first = message((self.rank + 1) % self.size)
        if not _wants_turns(size, first):
            made = {(self.rank + 1) % self.size: first}
            trade_at_once(
                self, size, lambda rank: made[rank] if rank in made else message(rank), take
            )
            return
        with self._verb():
            for source, data in self._in_turns(first, message, [size] * self.size):
                take(source, data)

    def exchange(
        self, x: Tensor, to: int | None, source: int | None, size: int | None = None
    ) -> Tensor | None:
        if to == self.rank and source == self.rank:
            return x.clone()
        with self._verb():
            if size is None:
                told = torch.zeros(1, dtype=torch.int64, device=x.device)
                self._swap(torch.tensor([x.numel()], device=x.device), to, told, source)
                size = self._check_sizes({source: int(told)}, x)[0]
            out = x.new_empty(size if source is not None else 0)
            self._swap(x, to, out, source)
        return out if source is not None else None

    def broadcast(self, x: Tensor, root: int) -> Tensor:
        if x.numel() and self.size > 1:
            options = dist.BroadcastOptions()
            options.rootRank = root
            with self._verb():
                self._finish(self.group.broadcast([x], options), x)
        return x

    def barrier(self) -> None:
        if self.size > 1:
            with self._verb():
                self._finish(self.group.barrier(), torch.empty(0))

    def _all_to_all_in_turns(self, xs: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        got = {self.rank: xs[self.rank]}
        got |= self._in_turns(xs[(self.rank + 1) % self.size], xs.__getitem__, sizes)
        return [got[rank] for rank in range(self.size)]

    def _in_turns(
        self, first: Tensor, message: Callable[[int], Tensor], sizes: Sequence[int]
    ) -> Iterator[tuple[int, Tensor]]:
        """Everyone's message for this rank, as it comes; `first` is the one that leaves first.

        A rank opens a receive when it is that sender's turn, and goes on when the message is in. So
        nobody is ahead of a receiver, and each link carries one message at a time. Meanwhile the
        next message is made, and the last one is taken.
        """
        peers = list(turns(self.rank, self.size))
        sends, ahead, come = [], first, None
        for number, (to, source) in enumerate(peers):
            got = scratch.empty(sizes[source], first.dtype, first.device)
            receive = self._post(self.group.recv, got, source)
            sends.append(self._post(self.group.send, ahead.contiguous(), to))
            if come is not None:
                yield come
            if number + 1 < len(peers):
                ahead = message(peers[number + 1][0])
            self._wait(receive)
            self.since = time.monotonic()  # that rank is there
            come = source, got
        if come is not None:
            yield come
        for send in sends:
            self._wait(send)

    @staticmethod
    def _post(verb: Callable[..., dist.Work], x: Tensor, peer: int) -> dist.Work | None:
        return verb([x], peer, 0) if x.numel() else None

    def _wait(self, work: dist.Work | None) -> None:
        """For a message: gloo gives up one whose wait times out, so there is no peeking here."""
        try:
            if work is not None:
                work.wait()
        except RuntimeError as error:
            self._blame(error)

    def _to_everyone(self, x: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """The same bytes as gloo's ring, all under way at once: one hop in place of P - 1, each of
        which waits for a thread to wake up (1.3 ms with four workers on two cores)."""
        theirs = [0 if rank == self.rank else n for rank, n in enumerate(sizes)]
        mine = [0 if rank == self.rank else x.numel() for rank in range(self.size)]
        parts = self._all_to_all(x.repeat(self.size - 1), mine, theirs)
        parts[self.rank] = x
        return parts

    def _gather_padded(self, x: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """Equal shapes only: pad to the longest."""
        room = max(sizes)
        if room == 0:
            return [x.new_empty(0) for _ in sizes]
        block = x if x.numel() == room else torch.cat([x, x.new_zeros(room - x.numel())])
        out = x.new_empty(self.size * room)
        self._finish(self.group._allgather_base(out, block), x)
        return [out[r * room : r * room + n] for r, n in enumerate(sizes)]

    def _all_to_all(self, x: Tensor, mine: Sequence[int], theirs: Sequence[int]) -> list[Tensor]:
        out = x.new_empty(sum(theirs))
        self._finish(self.group.alltoall_base(out, x, list(theirs), list(mine)), out)
        return list(out.split(list(theirs)))

    def _exchange_sizes(self, mine: Sequence[int], like: Tensor) -> tuple[list[int], bool]:
        """How many entries every rank has for me, and whether anyone wants turns; `mine` is how
        many I have for each."""
        wanted = _LARGE if _wants_turns(max(mine), like) else 0
        asked = torch.tensor([size | wanted for size in mine], device=like.device)
        ones = [1] * self.size
        told = torch.cat(self._all_to_all(asked, ones, ones)).tolist()
        in_turns = any(size & _LARGE for size in told)
        sizes = self._check_sizes({r: size & ~_LARGE for r, size in enumerate(told)}, like)
        return sizes, in_turns

    def _check_sizes(self, sizes: dict[int | None, int], like: Tensor) -> list[int]:
        for rank, size in sizes.items():
            if size < 0 or (self.room is not None and size * like.element_size() > self.room):
                raise WireError(
                    f"rank {rank} announces {size} entries of {like.element_size()} bytes where "
                    f"{self.room} bytes are the most; do all ranks run the same code?"
                )
        return list(sizes.values())

    def _swap(self, x: Tensor, to: int | None, out: Tensor, source: int | None) -> None:
        """Send and receive as one operation: NCCL runs the operations of a communicator one after
        the other, so a send of its own would wait for a receive that the other side has not
        begun."""
        sends = [(x.contiguous(), to)] if to is not None and x.numel() else []
        receives = [(out, source)] if source is not None and out.numel() else []
        if not sends and not receives:
            return
        # gloo starts both at once by itself
        grouped = self.group._get_backend(x.device).supports_coalescing
        if grouped:
            self.group._start_coalescing(x.device)
        works = [self.group.send([data], peer, 0) for data, peer in sends]
        works += [self.group.recv([data], peer, 0) for data, peer in receives]
        if grouped:
            works = [self.group._end_coalescing(x.device)]
        for work in works:
            self._wait(work)

    def _finish(self, work: dist.Work, x: Tensor) -> None:
        """Wait for a collective, with an eye on failures elsewhere."""
        while True:
            try:
                # streams: waiting for those here would block the host for nothing
                work.wait(_PEEK) if x.device.type == "cpu" else work.wait()
                return
            except RuntimeError as error:
                if work.is_completed():  # it failed, or ended just now
                    self._end(work, error)
                    return
                self._look()

    def _end(self, work: dist.Work, error: RuntimeError) -> None:
        try:
            work.wait()
        except RuntimeError as broken:
            self._blame(broken)

    @contextmanager
    def _verb(self) -> Iterator[None]:
        self.since = time.monotonic()
        if self._guard is not None:
            self._guard.inside(True)
        try:
            yield
        finally:
            self.since = None
            if self._guard is not None:
                self._guard.inside(False)

    def _look(self) -> None:
        if self._guard is not None:
            self._guard.look()

    def _blame(self, error: RuntimeError) -> None:
        if self._guard is None:
            raise error
        self._guard.blame(error)


def _wants_turns(longest: int, like: Tensor) -> bool:
    """Whether messages of which the longest has so many entries go from pair to pair in turns."""
    return like.device.type == "cpu" and longest * like.element_size() >= IN_TURNS
