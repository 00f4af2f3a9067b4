"""P ranks as threads of one process: the laptop's cluster, for tests, studies and debugging.

    results = local.run(4, lambda comm: recipe.reduce(bucket_of(comm.rank), comm))

Sums are taken in rank order on every rank, so all ranks round alike. Sizes that ranks do not agree
on are an error here, where a real network hangs or dies.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from thinwire.comm.pairwise import trade_at_once

T = TypeVar("T")


class _Board:
    """One cell a rank to write on, and a gate all ranks pass together.

    Between gates ranks take turns (`turn`): small tensors in many threads would spend their time
    fighting for the interpreter, three times as long with eight ranks.
    """

    def __init__(self, size: int, timeout: float) -> None:
        self.cells: list[Any] = [None] * size
        self.gate = threading.Barrier(size, timeout=timeout)
        self.turn = threading.Lock()
        self.mail: dict[tuple[int, int], list[Any]] = {}
        self.arrived = threading.Condition()
        self.timeout = timeout

    def post(self, source: int, to: int, letter: Any) -> None:
        with self.arrived:
            self.mail.setdefault((source, to), []).append(letter)
            self.arrived.notify_all()

    def fetch(self, source: int, to: int) -> Any:
        """The oldest letter of that pair; other ranks have their turn while we wait."""
        self.turn.release()
        try:
            with self.arrived:
                there = self.arrived.wait_for(
                    lambda: self.mail.get((source, to)) or self.gate.broken, self.timeout
                )
                if not there or self.gate.broken:
                    raise threading.BrokenBarrierError
                return self.mail[source, to].pop(0)
        finally:
            self.turn.acquire()

    def abort(self) -> None:
        """Wake everybody who waits for a rank that will not come."""
        self.gate.abort()
        with self.arrived:
            self.arrived.notify_all()

    def pass_gate(self) -> None:
        self.turn.release()
        try:
            self.gate.wait()
        finally:
            self.turn.acquire()


class LocalComm:
    """One rank's end of the board."""

    def __init__(self, board: _Board, rank: int, size: int) -> None:
        self._board, self.rank, self.size = board, rank, size

    def _everyone(self, mine: Any) -> list[Any]:
        """Show mine, see everyone's, and leave only when all have seen it."""
        self._board.cells[self.rank] = mine
        self._board.pass_gate()
        seen = list(self._board.cells)
        self._board.pass_gate()
        return seen

    def all_reduce(self, x: Tensor) -> Tensor:
        parts = self._everyone(x.clone())
        x.copy_(parts[0])
        for part in parts[1:]:
            x.add_(part)
        return x

    def all_gather(self, x: Tensor, sizes: Sequence[int] | None = None) -> list[Tensor]:
        got = [part.clone() for part in self._everyone(x.clone())]
        return self._check_sizes(got, sizes)

    def all_to_all(self, xs: Sequence[Tensor], sizes: Sequence[int] | None = None) -> list[Tensor]:
        sent = self._everyone([x.clone() for x in xs])
        return self._check_sizes([row[self.rank] for row in sent], sizes)

    def trade(
        self, size: int, message: Callable[[int], Tensor], take: Callable[[int, Tensor], None]
    ) -> None:
        trade_at_once(self, size, message, take)

    def exchange(
        self, x: Tensor, to: int | None, source: int | None, size: int | None = None
    ) -> Tensor | None:
        if to is not None:
            self._board.post(self.rank, to, (x.clone(), size is None))
        if source is None:
            return None
        data, announced = self._board.fetch(source, self.rank)
        if announced != (size is None):
            raise RuntimeError(f"rank {source} and rank {self.rank}: one announces a size, one not")
        return self._check_sizes([data], None if size is None else [size])[0]

    def _check_sizes(self, got: list[Tensor], sizes: Sequence[int] | None) -> list[Tensor]:
        """What was received, if it has the sizes this rank was sure of: networks trust those."""
        found = [part.numel() for part in got]
        if sizes is not None and found != list(sizes):
            raise RuntimeError(f"rank {self.rank} expected {list(sizes)} entries, got {found}")
        return got

    def broadcast(self, x: Tensor, root: int) -> Tensor:
        return x.copy_(self._everyone(x.clone())[root])

    def barrier(self) -> None:
        self._everyone(None)


def run(size: int, worker: Callable[[LocalComm], T], timeout: float = 60.0) -> list[T]:
    """Run `worker(comm)` once per rank, in threads; returns the results in rank order.

    The first error of any rank ends all of them and is raised here.

    Args:
        size: How many ranks.
        worker: What each does; it gets the rank's comm.
        timeout: Seconds that a rank waits for the others.

    Example:
        >>> run(3, lambda comm: comm.all_reduce(torch.ones(1)).item())
        [3.0, 3.0, 3.0]
    """
    if size < 1:
        raise ValueError(f"a world needs at least one rank, got {size}")
    board = _Board(size, timeout)
    results: list[Any] = [None] * size
    errors: dict[int, BaseException] = {}

    def body(rank: int) -> None:
        try:
            # grad mode belongs to the thread
            with board.turn, torch.set_grad_enabled(grad_enabled):
                results[rank] = worker(LocalComm(board, rank, size))
        except BaseException as error:  # carried over to the caller's thread
            errors[rank] = error
            board.abort()

    grad_enabled = torch.is_grad_enabled()
    threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    causes = [e for e in errors.values() if not isinstance(e, threading.BrokenBarrierError)]
    if causes:
        raise causes[0]
    if errors:
        raise TimeoutError(f"the ranks did not meet within {timeout} s: not all of them called the "
                           "same verbs")  # fmt: skip
    return results
