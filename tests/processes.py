"""Real worker processes for tests: a pool that runs functions in gloo worlds of any size.

Starting Python with torch costs seconds, so one pool serves a whole session; every call gets a
fresh process group. Functions are module-level and take (rank, world, *args).
"""

from __future__ import annotations

import multiprocessing
import queue
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing  # tensors may go through queues

from thinwire_lab.local import workers


class WorkerError(AssertionError):
    """What the workers raised, by rank."""


class Pool:
    def __init__(self, size: int = 4) -> None:
        context = workers.choose_context()
        self._calls = [context.Queue() for _ in range(size)]
        self._results = context.Queue()
        self._workers = [
            context.Process(target=_serve, args=(rank, self._calls[rank], self._results))
            for rank in range(size)
        ]
        for worker in self._workers:
            worker.start()

    def run(
        self, world: int, function: Callable[..., Any], *args: Any, timeout: float = 300.0
    ) -> list[Any]:
        """function(rank, world, *args) on every rank; the results in rank order."""
        with tempfile.TemporaryDirectory() as folder:
            for rank in range(world):
                self._calls[rank].put((function, args, world, str(Path(folder) / "store")))
            results = self._collect(world, timeout)
        errors = {rank: text for rank, (ok, text) in results.items() if not ok}
        if errors:
            raise WorkerError("\n".join(f"rank {r}:\n{text}" for r, text in sorted(errors.items())))
        return [results[rank][1] for rank in range(world)]

    def _collect(self, world: int, timeout: float) -> dict[int, Any]:
        results: dict[int, Any] = {}
        deadline = time.monotonic() + timeout
        while len(results) < world:
            try:
                rank, ok, value = self._results.get(timeout=0.2)
                results[rank] = (ok, value)
            except queue.Empty:
                dead = [w.exitcode for w in self._workers if w.exitcode]
                if dead or time.monotonic() > deadline:
                    self.close()
                    why = f"a worker died with {dead[0]}" if dead else f"no answer in {timeout} s"
                    raise WorkerError(f"{why}; done: {results}") from None
        return results

    def close(self) -> None:
        for worker in self._workers:
            worker.kill()
        for worker in self._workers:
            worker.join()


def prepare() -> None:
    """Start the process from which this session forks its workers, with what tests need loaded.

    `workers.choose_context` would start one with what `thinwire` needs; where one runs, it takes
    that.
    """
    if sys.platform == "linux":
        multiprocessing.get_context("forkserver").set_forkserver_preload(["tests.nursery"])
        forkserver.ensure_running()


def once(world: int, function: Callable[..., Any], *args: Any, timeout: float = 300.0) -> list[Any]:
    """The same in processes of its own, for calls that leave a process unusable."""
    pool = Pool(world)
    try:
        return pool.run(world, function, *args, timeout=timeout)
    finally:
        pool.close()


def _serve(rank: int, calls: Any, results: Any) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    while True:
        function, args, world, store = calls.get()
        try:
            dist.init_process_group(
                "gloo", init_method=f"file://{store}", rank=rank, world_size=world
            )
            value = function(rank, world, *args)
            dist.barrier()
            results.put((rank, True, value))
        except BaseException:
            results.put((rank, False, traceback.format_exc()))
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
