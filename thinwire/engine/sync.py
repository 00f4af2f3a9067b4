"""A Sync is what `attach` and `distribute` return: a recipe at work in one training loop.

A socket (DDP's hook, or gradient hooks) submits buckets in an order that is the same on all
ranks; the lane takes the steps while backward goes on.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.futures import Future

from thinwire import kernels
from thinwire.combinators import dense_form, memories
from thinwire.describe import describe, parts
from thinwire.engine import checkpoint
from thinwire.engine.lane import Lane
from thinwire.engine.peers import Peers
from thinwire.engine.rebuilt import Expected
from thinwire.engine.steps import Arrival, Steps, slot_line
from thinwire.layout import Layout
from thinwire.planned import Planned, forget
from thinwire.protocols import Reduced, Reducer


class Socket(Protocol):
    """How gradients come in and means go out."""

    def synchronize(self) -> None: ...

    def no_sync(self) -> AbstractContextManager[None]: ...

    def join(self) -> AbstractContextManager[object]: ...

    def unplug(self) -> None: ...


class Sync:
    """Compressed gradient averaging, attached to one training loop."""

    def __init__(
        self,
        recipe: Reducer,
        parameters: Mapping[str, Tensor],
        peers: Peers,
        scaler: Any,
        tracks_unused: bool,
        rates: Callable[[], dict[str, float]] | None = None,
    ) -> None:
        self.recipe = recipe
        self._dense = dense_form(recipe)
        self._peers, self._scaler = peers, scaler
        slots = Layout.of(parameters).slots
        self._slots = {slot.name: slot for slot in slots}
        self._scale = 1.0
        wanted = any(getattr(memory, "learning_rate", False) for memory in memories(recipe))
        self._rates_of = rates if wanted else None
        self._rates: dict[str, float] | None = None
        self._socket: Socket | None = None
        lines = [
            f"recipe {describe(recipe)}",
            f"scaler {self._scaled()}",
            f"unused parameters tracked {tracks_unused}",
            f"torch {torch.__version__}",
        ]
        self._lane = Lane(peers.watch)
        # at exit too, before Python ends
        self._goodbye = weakref.finalize(self, _leave, self._lane, peers)
        kinds = [f"{p.dtype} on {p.device.type}" for p in parameters.values()]
        shapes = map(slot_line, slots)
        lines += [f"{shape} {kind}" for shape, kind in zip(shapes, kinds, strict=True)]
        peers.agree("recipe or the parameters", lines)
        kernels.warm()  # before anybody waits for a step
        self._steps = Steps(recipe, peers)

    def synchronize(self) -> None:
        """Gradients are averages when this returns: call it before clipping them."""
        self._plugged().synchronize()

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes inside only accumulate; the first one outside sends the sum."""
        return self._plugged().no_sync()

    def join(self) -> AbstractContextManager[object]:
        """Train inside with uneven inputs: ranks that run out play along until all have."""
        return self._plugged().join()

    def pause(self) -> None:
        """Average densely from the next step on, delivering what was held back. On all ranks."""
        self._lane.wait()
        self._peers.meet("pause()")
        self._steps.recipe = self._dense

    def resume(self) -> None:
        """Compress again from the next step on. On all ranks."""
        self._lane.wait()
        self._peers.meet("resume()")
        self._steps.recipe = self.recipe

    def replan(self) -> None:
        """Let a recipe that chooses, as `auto` does, choose anew from the next step on. On all
        ranks."""
        self._lane.wait()
        if not any(isinstance(part, Planned) for part in parts(self.recipe)):
            raise ValueError("this recipe makes no choice that could be made anew; auto does")
        self._peers.meet("replan()")
        forget(self._steps.root.get("slots", {}))

    def detach(self) -> None:
        """Leave the training loop as it was. To deliver the residual, pause for one step before."""
        self._lane.settle()
        self._plugged().unplug()
        self._socket = None
        self._goodbye()

    def metrics(self) -> dict[str, Any]:
        """Totals of this rank so far: steps, bytes, density achieved, seconds by phase."""
        meter, comm = self._steps.meter, self._steps.comm
        return {
            "steps": meter.committed + meter.skipped,
            "bytes_sent": comm.bytes,
            "bytes_dense": meter.bytes_dense,
            "messages": comm.messages,
            "density": meter.entries / meter.numel if meter.numel else 0.0,
            "skipped_steps": meter.skipped,
            "seconds": {
                "select": meter.select,
                "exchange": comm.seconds,
                "scatter": meter.scatter,
                "exposed": meter.exposed,
            },
        }

    def state_dict(self) -> dict[str, Any]:
        """This rank's state after its last whole step: plain tensors and numbers, and a digest.

        Save it on every rank. It can be had after a failure too.
        """
        self._lane.settle()
        self._steps.roll_back()
        state = {
            "version": checkpoint.VERSION,
            "recipe": describe(self.recipe),
            "world": self._peers.comm.size,
            "rank": self._peers.comm.rank,
            "step": self._steps.number,
            "shapes": checkpoint.shapes(self._slots),
            "next": [list(names) for names in self._steps.next],
            "buckets": [list(names) for names in self._steps.buckets],
            **checkpoint.copied(self._steps.root),
        }
        return checkpoint.signed(state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict()` of the same rank in a world of the same size. On all ranks."""
        self._lane.wait()
        comm, here = self._peers.comm, "load_state_dict()"
        try:
            checkpoint.check(state, comm.rank, comm.size, self._slots)
        except ValueError as error:
            self._peers.refuse(here, error)
            raise
        self._peers.meet(here)
        self._steps.load(checkpoint.fitted(state, describe(self.recipe)))

    @property
    def attached(self) -> bool:
        return self._socket is not None

    # What sockets call: the rest of the file.

    def plug(self, socket: Socket) -> None:
        self._socket = socket

    def expect(self, expected: Expected | None) -> None:
        """Before the last bucket of a step: how later ones will be cut."""
        self._steps.expect(expected)

    def submit(
        self, arrival: Arrival, then: Callable[[Reduced], None] | None = None
    ) -> Future[Tensor]:
        """Reduce a bucket on the lane; `then` runs there with the result."""
        arrival.scale = self._scale_now(arrival.first)
        arrival.rates = self._rates_now(arrival.first)

        def work() -> Tensor:
            reduced = self._steps.reduce(arrival)
            if then is not None:
                then(reduced)
            return reduced.mean

        names = [slot.name for slot in arrival.layout.slots]
        return self._lane.submit(lambda: self._reported(work, names), arrival.flat)

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

        def work() -> Tensor:
            mean = self._steps.reduce_sparse(grad, first=first, last=last)
            if then is not None:
                then(mean)
            return mean

        return self._lane.submit(lambda: self._reported(work, [name]), grad)

    def wait(self) -> None:
        """Until all that was submitted is done; the time is what communication really cost."""
        begin = time.perf_counter()
        try:
            self._lane.wait()
        finally:
            self._steps.meter.exposed += time.perf_counter() - begin

    def _reported(self, work: Callable[[], Tensor], names: list[str]) -> Tensor:
        """Run it; if it fails, tell the other ranks which rank, step and parameters it was."""
        try:
            return work()
        except BaseException as error:
            shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
            self._peers.report(error, f"in step {self._steps.number}, bucket of {shown}")
            raise

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

    def _plugged(self) -> Socket:
        if self._socket is None:
            raise RuntimeError("this sync is detached; attach the recipe again")
        return self._socket


def _leave(lane: Lane, peers: Peers) -> None:
    lane.close()
    peers.leave(idle=lane.idle)
