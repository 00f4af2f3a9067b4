"""What sockets hand their buckets to: the lane, and the steps it takes for one training loop.

Buckets come in an order that is the same on all ranks; the lane works through them while backward
goes on. The construction is where ranks first compare what they are about to do.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from thinwire import kernels
from thinwire.combinators import memories
from thinwire.describe import describe
from thinwire.engine.lane import Lane
from thinwire.engine.peers import Peers
from thinwire.engine.rebuilt import Expected
from thinwire.engine.steps import Arrival, Steps, slot_line
from thinwire.layout import Layout
from thinwire.protocols import Reduced, Reducer


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
        wanted = any(getattr(memory, "learning_rate", False) for memory in memories(recipe))
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

        def work() -> Tensor:
            reduced = self.steps.reduce(arrival)
            if then is not None:
                then(reduced)
            return reduced.mean

        names = [slot.name for slot in arrival.layout.slots]
        return self.lane.submit(lambda: self._reported(work, names), arrival.flat)

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
            mean = self.steps.reduce_sparse(grad, first=first, last=last)
            if then is not None:
                then(mean)
            return mean

        return self.lane.submit(lambda: self._reported(work, [name]), grad)

    def wait(self) -> None:
        """Until all that was submitted is done; the time is what communication really cost."""
        begin = time.perf_counter()
        try:
            self.lane.wait()
        finally:
            self.steps.meter.exposed += time.perf_counter() - begin

    def _reported(self, work: Callable[[], Tensor], names: list[str]) -> Tensor:
        """Run it; if it fails, tell the other ranks which rank, step and parameters it was."""
        try:
            return work()
        except BaseException as error:
            shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
            self.peers.report(error, f"in step {self.steps.number}, bucket of {shown}")
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


def _leave(lane: Lane, peers: Peers) -> None:
    lane.close()
    peers.leave(idle=lane.idle)
