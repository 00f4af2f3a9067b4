"""A lane: one thread that runs jobs in the order they were given.

Reducers are straight-line code with blocking verbs; the lane is what overlaps them with backward.
One thread and one process group mean one order of collectives, the same on every rank. (Chained
Future callbacks cannot promise that on gloo, which runs them on a pool of threads.)
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.futures import Future

PEEK = 0.5  # seconds
Job = tuple[Callable[[], Tensor], Tensor, "Future[Tensor]", "torch.cuda.Event | None"]


class Lane:
    """Runs jobs one after the other; after the first error it runs none.

    Who waits for them calls `watch` now and then, which raises if they will never end.
    """

    def __init__(self, watch: Callable[[], None] | None = None) -> None:
        self._watch = watch or _nothing_to_see
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._open = 0
        self._stuck = False  # the thread is inside a wait that nothing will end soon
        self._change = threading.Condition()
        self.error: BaseException | None = None
        self._stream: torch.cuda.Stream | None = None
        # A daemon: a thread stuck behind a dead peer must not keep the process alive.
        self._thread = threading.Thread(target=self._run, name="thinwire lane", daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], Tensor], fallback: Tensor) -> Future[Tensor]:
        """Run `work` later. The future always ends with a tensor: `fallback` if work failed.

        An exception set on a torch Future reaches DDP as "unable to cast to Tensor"; the true one
        is kept here and raised by `wait()`.
        """
        on_gpu = fallback.device.type == "cuda"
        future: Future[Tensor] = Future(devices=[fallback.device] if on_gpu else None)
        ready = torch.cuda.current_stream(fallback.device).record_event() if on_gpu else None
        with self._change:
            self._open += 1
        self._jobs.put((work, fallback, future, ready))
        return future

    def settle(self) -> None:
        """Until every job given so far is done, or given up."""
        while self.error is None or not self._stuck:
            with self._change:
                if self._change.wait_for(lambda: self._open == 0, PEEK):
                    return
            try:
                self._watch()
            except RuntimeError as lost:
                self._stuck = True
                self.error = self.error or lost

    @property
    def idle(self) -> bool:
        """Whether everything given so far is done, and well."""
        return self._open == 0 and self.error is None

    def wait(self) -> None:
        """The same; raises the first error."""
        self.settle()
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        """Let the thread end once its jobs are done."""
        self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            work, fallback, future, ready = job
            # The future remembers the stream it is completed on: DDP waits for that one.
            with self._after(ready, fallback.device):
                future.set_result(self._result(work, fallback))
            del job, work, fallback, future  # do not keep the last gradients alive while idle
            with self._change:
                self._open -= 1
                self._change.notify_all()

    def _result(self, work: Callable[[], Tensor], fallback: Tensor) -> Tensor:
        if self.error is not None:
            return fallback
        try:
            return work()
        except BaseException as error:  # raised where the caller waits
            self.error = error
            return fallback

    @contextmanager
    def _after(self, ready: torch.cuda.Event | None, device: torch.device) -> Iterator[None]:
        """On a GPU the lane has a stream of its own, which starts when the gradient is there."""
        if ready is None:
            yield
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(ready)
            yield


def _nothing_to_see() -> None:
    """Jobs that cannot hang."""
