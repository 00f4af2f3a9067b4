"""The lane: sockets hand in buckets, one thread reduces them in that order beside backward.

Reducers are straight-line code with blocking verbs; the lane is what overlaps them with backward.
One thread and one process group mean one order of collectives, the same on every rank. (Chained
Future callbacks cannot promise that on gloo, which runs them on a pool of threads.) `Lane` is the
thread, `Intake` what a socket holds of it, and where ranks first compare what they are about to do.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from thinwire import kernels
from thinwire.combinators import memories
from thinwire.describe import describe
from thinwire.engine.peers import Peers
from thinwire.engine.rebuilt import Expected
from thinwire.engine.steps import Arrival, Steps, slot_line
from thinwire.layout import Layout
from thinwire.protocols import MemoryPromises, Reduced, Reducer, promised

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


class Intake:
    """Buckets in, means out, for as long as a recipe is attached."""

    def __init__(
        self,
        recipe: Reducer,
        parameters: Mapping[str, Tensor],
        peers: Peers,
        scaler: Any,
        tracks_unused: bool,
        rates: Callable[[], dict[str, float]] | None = None,
    ) -> None:
        self.recipe, self.peers = recipe, peers
        slots = Layout.of(parameters).slots
        self.slots = {slot.name: slot for slot in slots}
        self._scaler, self._scale = scaler, 1.0
        wanted = any(promised(MemoryPromises, memory).learning_rate for memory in memories(recipe))
        self._rates_of = rates if wanted else None
        self._rates: dict[str, float] | None = None
        self.lane = Lane(peers.watch)
        # at exit too, before Python ends
        self.leave = weakref.finalize(self, _leave, self.lane, peers)
        lines = [
            f"recipe {describe(recipe)}",
            f"scaler {self._scaled()}",
            f"unused parameters tracked {tracks_unused}",
            f"torch {torch.__version__}",
        ]
        kinds = [f"{p.dtype} on {p.device.type}" for p in parameters.values()]
        shapes = map(slot_line, slots)
        lines += [f"{shape} {kind}" for shape, kind in zip(shapes, kinds, strict=True)]
        peers.agree("recipe or the parameters", lines)
        kernels.warm()  # before anybody waits for a step
        self.steps = Steps(recipe, peers)

    def expect(self, expected: Expected | None) -> None:
        """Before the last bucket of a step: how later ones will be cut."""
        self.steps.expect(expected)

    def submit(
        self, arrival: Arrival, then: Callable[[Reduced], None] | None = None
    ) -> Future[Tensor]:
        """Reduce a bucket on the lane; `then` runs there with the result."""
        arrival.scale = self._scale_now(arrival.first)
        arrival.rates = self._rates_now(arrival.first)
        return self.lane.submit(partial(self._reduce, arrival, then), arrival.flat)

    def submit_sparse(
        self,
        grad: Tensor,
        name: str,
        *,
        first: bool,
        last: bool,
        then: Callable[[Tensor], None] | None = None,
    ) -> Future[Tensor]:
        """Average a sparse gradient as it is, in its turn among the buckets."""
        self._scale_now(first)
        return self.lane.submit(partial(self._reduce_sparse, grad, name, first, last, then), grad)

    def wait(self) -> None:
        """Until all that was submitted is done; the time is what communication really cost."""
        begin = time.perf_counter()
        try:
            self.lane.wait()
        finally:
            self.steps.meter.exposed += time.perf_counter() - begin

    def _reduce(self, arrival: Arrival, then: Callable[[Reduced], None] | None) -> Tensor:
        try:
            reduced = self.steps.reduce(arrival)
            if then is not None:
                then(reduced)
        except BaseException as error:
            self._report(error, [slot.name for slot in arrival.layout.slots])
            raise
        return reduced.mean

    def _reduce_sparse(
        self,
        grad: Tensor,
        name: str,
        first: bool,
        last: bool,
        then: Callable[[Tensor], None] | None,
    ) -> Tensor:
        try:
            mean = self.steps.reduce_sparse(grad, first=first, last=last)
            if then is not None:
                then(mean)
        except BaseException as error:
            self._report(error, [name])
            raise
        return mean

    def _report(self, error: BaseException, names: list[str]) -> None:
        """Tell the other ranks which rank, step and parameters it was."""
        shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        self.peers.report(error, f"in step {self.steps.number}, bucket of {shown}")

    def _scale_now(self, first: bool) -> float:
        """The loss scale of this step, read once, with its first bucket."""
        if first and self._scaled():
            self._scale = float(self._scaler.get_scale())
        return self._scale

    def _rates_now(self, first: bool) -> dict[str, float] | None:
        """The learning rates of this step, likewise."""
        if self._rates_of is not None and (first or self._rates is None):
            self._rates = self._rates_of()
        return self._rates

    def _scaled(self) -> bool:
        return self._scaler is not None and bool(self._scaler.is_enabled())


def _leave(lane: Lane, peers: Peers) -> None:
    lane.close()
    peers.leave(idle=lane.idle)
