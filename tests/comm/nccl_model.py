"""A model of NCCL's rule, since there is no GPU here, in place of a process group.

Operations of one communicator run one after the other, in the order they were begun; a send does
not end before the other side has come to the receive. What is begun between `_start_coalescing`
and `_end_coalescing` runs as one operation.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

Job = Callable[[], None]


class Work:
    def __init__(self) -> None:
        self.done = threading.Event()

    def wait(self, timeout: Any = None) -> None:
        if not self.done.wait(timeout.total_seconds() if timeout else 10.0):
            raise RuntimeError("timed out")

    def is_completed(self) -> bool:
        return self.done.is_set()


class World:
    """What all ranks share: letters under way, and a gate for collectives."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.mail: dict[tuple[int, int], queue.Queue[Any]] = {
            (a, b): queue.Queue() for a in range(size) for b in range(size)
        }
        self.gate = threading.Barrier(size, timeout=10.0)
        self.cells: list[Any] = [None] * size


class Group:
    """One rank's communicator: a stream that runs what it is given, in order."""

    supports_coalescing = True

    def __init__(self, world: World, rank: int) -> None:
        self._world, self._rank = world, rank
        self._stream: queue.Queue[tuple[list[Job], Work] | None] = queue.Queue()
        self._open: list[Job] | None = None
        threading.Thread(target=self._run, daemon=True).start()

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._world.size

    def _get_backend(self, device: Any) -> Group:
        return self

    def _run(self) -> None:
        while (item := self._stream.get()) is not None:
            jobs, work = item
            together = [threading.Thread(target=job, daemon=True) for job in jobs]
            for job in together:
                job.start()
            for job in together:
                job.join()
            work.done.set()

    def close(self) -> None:
        self._stream.put(None)

    def _begin(self, job: Job) -> Work:
        work = Work()
        if self._open is None:
            self._stream.put(([job], work))
        else:
            self._open.append(job)
        return work

    def _start_coalescing(self, device: Any) -> None:
        self._open = []

    def _end_coalescing(self, device: Any) -> Work:
        jobs, self._open = self._open or [], None
        work = Work()
        self._stream.put((jobs, work))
        return work

    def send(self, tensors: Sequence[Tensor], to: int, tag: int) -> Work:
        data, taken = tensors[0].clone(), threading.Event()

        def job() -> None:
            self._world.mail[self._rank, to].put((data, taken))
            taken.wait()

        return self._begin(job)

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int) -> Work:
        def job() -> None:
            data, taken = self._world.mail[source, self._rank].get()
            tensors[0].copy_(data)
            taken.set()

        return self._begin(job)

    def allreduce(self, tensors: Sequence[Tensor]) -> Work:
        x = tensors[0]

        def job() -> None:
            parts = self._everyone(x.clone())
            x.copy_(parts[0])
            for part in parts[1:]:
                x.add_(part)

        return self._begin(job)

    def alltoall_base(
        self, out: Tensor, x: Tensor, theirs: Sequence[int], mine: Sequence[int]
    ) -> Work:
        def job() -> None:
            rows = self._everyone(list(x.clone().split(list(mine))))
            for place, row in zip(out.split(list(theirs)), rows, strict=True):
                place.copy_(row[self._rank])

        return self._begin(job)

    def broadcast(self, tensors: Sequence[Tensor], options: Any) -> Work:
        x = tensors[0]

        def job() -> None:
            x.copy_(self._everyone(x.clone())[options.rootRank])

        return self._begin(job)

    def barrier(self) -> Work:
        return self._begin(lambda: self._everyone(None) and None)

    def _everyone(self, mine: Any) -> list[Any]:
        self._world.cells[self._rank] = mine
        self._world.gate.wait()
        seen = list(self._world.cells)
        self._world.gate.wait()
        return seen
