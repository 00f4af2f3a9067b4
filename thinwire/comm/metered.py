"""A comm that counts: bytes under the textbook algorithms, rounds, and seconds spent waiting.

all-reduce 2(P-1)/P of its buffer, all-gather (P-1) times its own block, all-to-all what leaves,
exchange its own block; 0 in a world of one. The sizes that a ragged verb must first exchange
count too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from torch import Tensor

from thinwire.protocols import Comm, Traffic

T = TypeVar("T")
COUNT = 8  # bytes of one announced size


class Metered:
    """Wraps a comm and adds up its traffic."""

    def __init__(self, comm: Comm) -> None:
        self._comm, self.rank, self.size = comm, comm.rank, comm.size
        self.rounds = 0
        self.bytes = 0
        self.seconds = 0.0
        self.first: float | None = None  # when the first verb since `start()` was entered

    def start(self) -> None:
        self.first = None

    @property
    def traffic(self) -> Traffic:
        return Traffic(rounds=self.rounds, bytes=self.bytes)

    def all_reduce(self, x: Tensor) -> Tensor:
        return self._count(all_reduced(nbytes(x), self.size), lambda: self._comm.all_reduce(x))

    def all_gather(self, x: Tensor, sizes: Sequence[int] | None = None) -> list[Tensor]:
        cost = gathered(nbytes(x), self.size, ragged=sizes is None)
        return self._count(cost, lambda: self._comm.all_gather(x, sizes))

    def all_to_all(self, xs: Sequence[Tensor], sizes: Sequence[int] | None = None) -> list[Tensor]:
        leaving = sum(nbytes(x) for rank, x in enumerate(xs) if rank != self.rank)
        announced = COUNT * (self.size - 1) if sizes is None else 0
        return self._count(leaving + announced, lambda: self._comm.all_to_all(xs, sizes))

    def exchange(
        self, x: Tensor, to: int | None, source: int | None, size: int | None = None
    ) -> Tensor | None:
        leaves = to is not None and to != self.rank
        cost = nbytes(x) + (COUNT if size is None else 0) if leaves else 0
        return self._count(cost, lambda: self._comm.exchange(x, to, source, size))

    def broadcast(self, x: Tensor, root: int) -> Tensor:
        cost = nbytes(x) * (self.size - 1) if root == self.rank else 0
        return self._count(cost, lambda: self._comm.broadcast(x, root))

    def barrier(self) -> None:
        self._count(0, self._comm.barrier)

    def _count(self, cost: int, verb: Callable[[], T]) -> T:
        self.rounds += 1
        self.bytes += cost
        begin = time.perf_counter()
        if self.first is None:
            self.first = begin
        try:
            return verb()
        finally:
            self.seconds += time.perf_counter() - begin


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
