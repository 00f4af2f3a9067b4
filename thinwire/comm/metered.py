"""A comm that counts: bytes under the textbook algorithms, rounds, and seconds spent waiting.

all-reduce 2(P-1)/P of its buffer, all-gather (P-1) times its own block, all-to-all what leaves,
exchange its own block; 0 in a world of one. The sizes that a ragged verb must first exchange
count too. With `trace=True` every call is kept as an `Event`, with what it sends to whom: an
all-reduce goes round the ring, everything else straight to its peers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from torch import Tensor

from thinwire.comm.pairwise import Pairwise
from thinwire.protocols import Comm, Traffic

T = TypeVar("T")
COUNT = 8  # bytes of one announced size


@dataclass(frozen=True, kw_only=True)
class Event:
    """One call of a verb: when, in which phase of the algorithm, and what left for which rank."""

    step: int
    phase: str
    verb: str
    begin: float
    seconds: float
    sent: tuple[tuple[int, int], ...]  # (peer, bytes)

    @property
    def bytes(self) -> int:
        return sum(size for _, size in self.sent)


class Metered:
    """Wraps a comm and adds up its traffic."""

    def __init__(self, comm: Comm, *, trace: bool = False) -> None:
        self._comm, self.rank, self.size = comm, comm.rank, comm.size
        self.rounds = 0
        self.messages = 0  # an all-reduce is a ring: 2 (P - 1)
        self.bytes = 0
        self.seconds = 0.0
        self.first: float | None = None  # when the first verb since `start()` was entered
        self.ready = 0.0  # when the gradients of this bucket were complete
        self.step, self.phase = 0, ""
        self.events: list[Event] | None = [] if trace else None

    def start(self, ready: float = 0.0) -> None:
        """A new bucket, whose gradients were complete at `ready` (`time.perf_counter`)."""
        self.first, self.phase, self.ready = None, "", ready

    @property
    def traffic(self) -> Traffic:
        return Traffic(rounds=self.rounds, bytes=self.bytes)

    def all_reduce(self, x: Tensor) -> Tensor:
        cost = all_reduced(nbytes(x), self.size)
        sent = {(self.rank + 1) % self.size: cost} if self.size > 1 else {}
        return self._count("all_reduce", sent, lambda: self._comm.all_reduce(x))

    def all_gather(self, x: Tensor, sizes: Sequence[int] | None = None) -> list[Tensor]:
        block = nbytes(x) + (COUNT if sizes is None else 0)
        sent = dict.fromkeys(self._others(), block)
        return self._count("all_gather", sent, lambda: self._comm.all_gather(x, sizes))

    def all_to_all(self, xs: Sequence[Tensor], sizes: Sequence[int] | None = None) -> list[Tensor]:
        announced = COUNT if sizes is None else 0
        sent = {rank: nbytes(xs[rank]) + announced for rank in self._others()}
        return self._count("all_to_all", sent, lambda: self._comm.all_to_all(xs, sizes))

    def trade(
        self, size: int, message: Callable[[int], Tensor], take: Callable[[int, Tensor], None]
    ) -> None:
        """Counted as an all-to-all; making and taking messages is not waiting."""
        busy = 0.0

        def timed(work: Callable[..., T], *args: object) -> T:
            nonlocal busy
            begin = time.perf_counter()
            try:
                return work(*args)
            finally:
                busy += time.perf_counter() - begin

        sent = dict.fromkeys(self._others(), size)
        self._count("all_to_all", sent, lambda: self._comm.trade(
            size, partial(timed, message), partial(timed, take),
        ))  # fmt: skip
        self.seconds -= busy

    def exchange(
        self, x: Tensor, to: int | None, source: int | None, size: int | None = None
    ) -> Tensor | None:
        sent: dict[int, int] = {}
        if to is not None and to != self.rank:
            sent[to] = nbytes(x) + (COUNT if size is None else 0)
        return self._count("exchange", sent, lambda: self._comm.exchange(x, to, source, size))

    def broadcast(self, x: Tensor, root: int) -> Tensor:
        sent = dict.fromkeys(self._others(), nbytes(x)) if root == self.rank else {}
        return self._count("broadcast", sent, lambda: self._comm.broadcast(x, root))

    def barrier(self) -> None:
        self._count("barrier", {}, self._comm.barrier)

    def _others(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]

    def _count(self, verb: str, sent: dict[int, int], call: Callable[[], T]) -> T:
        self.rounds += 1
        self.messages += 2 * (self.size - 1) if verb == "all_reduce" else len(sent)
        self.bytes += sum(sent.values())
        begin = time.perf_counter()
        if self.first is None:
            self.first = begin
        try:
            return call()
        finally:
            seconds = time.perf_counter() - begin
            self.seconds += seconds
            if self.events is not None:
                self.events.append(Event(
                    step=self.step, phase=self.phase or verb, verb=verb, begin=begin,
                    seconds=seconds, sent=tuple(sent.items()),
                ))  # fmt: skip


def meter_of(comm: Comm) -> Metered | None:
    """The meter under this comm: where a reducer that decides by time finds seconds."""
    while isinstance(comm, Pairwise):
        comm = comm.under
    return comm if isinstance(comm, Metered) else None


def mark(comm: Comm, phase: str) -> None:
    """Tell the meter, if there is one under this comm, what comes next."""
    meter = meter_of(comm)
    if meter is not None:
        meter.phase = phase


def unmetered(comm: Comm) -> Comm:
    """The comm under the meter, for what must not be counted."""
    return comm._comm if isinstance(comm, Metered) else comm


def nbytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


def all_reduced(size: int, world: int) -> int:
    """Bytes a rank sends to all-reduce a buffer of `size` bytes."""
    return 2 * (world - 1) * size // world


def gathered(size: int, world: int, *, ragged: bool = False) -> int:
    """Bytes a rank sends to all-gather its block of `size` bytes."""
    return (world - 1) * (size + (COUNT if ragged else 0))
