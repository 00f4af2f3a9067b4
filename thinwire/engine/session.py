"""A Session is what `attach` and `distribute` return: a recipe at work in one training loop.

The object for the loop's owner: figures, checkpoints, pauses. Buckets go another way, from a socket
(DDP's hook, or gradient hooks) into an `Intake`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Protocol, Self, TypedDict

from thinwire.combinators import dense_form
from thinwire.describe import describe, parts
from thinwire.engine import checkpoint
from thinwire.engine.intake import Intake
from thinwire.engine.steps import Steps
from thinwire.planned import Planned, forget
from thinwire.protocols import Reducer


class Socket(Protocol):
    """How gradients come in and means go out."""

    def synchronize(self) -> None: ...

    def no_sync(self) -> AbstractContextManager[None]: ...

    def join(self) -> AbstractContextManager[object]: ...

    def unplug(self) -> None: ...


class Metrics(TypedDict):
    """Totals of one rank so far. All are numbers, so that a logger takes them as they are."""

    steps: int  # skipped ones too
    skipped_steps: int  # a gradient was not finite on some rank
    bytes_sent: int  # by this rank
    bytes_dense: int  # what it would have sent without a recipe
    messages: int
    density: float  # mean share of entries sent
    seconds_select: float  # choosing and coding
    seconds_exchange: float  # waiting for other ranks
    seconds_scatter: float  # putting means and residuals in place
    seconds_exposed: float  # what training really waited for


class Session:
    """Compressed gradient averaging, attached to one training loop.

    As a context manager it detaches at the end:

        with thinwire.attach(model, "int8()") as sync:
            train()
    """

    def __init__(self, intake: Intake, socket: Socket) -> None:
        self._intake = intake
        self._socket: Socket | None = socket

    @property
    def recipe(self) -> Reducer:
        return self._intake.recipe

    @property
    def attached(self) -> bool:
        return self._socket is not None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.attached:
            self.detach()

    def __repr__(self) -> str:
        comm, now = self._intake.peers.comm, self.metrics()
        state = "attached" if self.attached else "detached"
        fewer = now["bytes_dense"] / now["bytes_sent"] if now["bytes_sent"] else 1.0
        return (
            f"<thinwire.Session {state}: {describe(self.recipe)}, rank {comm.rank} of {comm.size}, "
            f"{now['steps']} steps, {fewer:.1f} times fewer bytes than dense>"
        )

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
        self._meet("pause()").recipe = dense_form(self.recipe)

    def resume(self) -> None:
        """Compress again from the next step on. On all ranks."""
        self._meet("resume()").recipe = self.recipe

    def replan(self) -> None:
        """Let a recipe that chooses, as `auto` does, choose anew from the next step on. On all
        ranks."""
        if not any(isinstance(part, Planned) for part in parts(self.recipe)):
            raise ValueError("this recipe makes no choice that could be made anew; auto does")
        forget(self._meet("replan()").root.get("slots", {}))

    def detach(self) -> None:
        """Leave the training loop as it was. To deliver the residual, pause for one step before."""
        self._intake.lane.settle()
        self._plugged().unplug()
        self._socket = None
        self._intake.leave()

    def metrics(self) -> Metrics:
        """Totals of this rank so far: steps, bytes, density achieved, seconds by phase."""
        meter, comm = self._intake.steps.meter, self._intake.steps.comm
        return {
            "steps": meter.steps,
            "skipped_steps": meter.skipped,
            "bytes_sent": comm.bytes,
            "bytes_dense": meter.bytes_dense,
            "messages": comm.messages,
            "density": meter.entries / meter.numel if meter.numel else 0.0,
            "seconds_select": meter.select,
            "seconds_exchange": comm.seconds,
            "seconds_scatter": meter.scatter,
            "seconds_exposed": meter.exposed,
        }

    def state_dict(self) -> dict[str, Any]:
        """This rank's state after its last whole step: plain tensors and numbers, and a digest.

        Save it on every rank. It can be had after a failure too.
        """
        steps, comm = self._intake.steps, self._intake.peers.comm
        self._intake.lane.settle()
        steps.roll_back()
        state = {
            "version": checkpoint.VERSION,
            "recipe": describe(self.recipe),
            "world": comm.size,
            "rank": comm.rank,
            "step": steps.number,
            "shapes": checkpoint.shapes(self._intake.slots),
            "next": [list(names) for names in steps.next],
            "buckets": [list(names) for names in steps.buckets],
            **checkpoint.copied(steps.root),
        }
        return checkpoint.signed(state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict()` of the same rank in a world of the same size. On all ranks."""
        self._intake.lane.wait()
        peers, here = self._intake.peers, "load_state_dict()"
        try:
            checkpoint.check(state, peers.comm.rank, peers.comm.size, self._intake.slots)
        except ValueError as error:
            peers.refuse(here, error)
            raise
        peers.meet(here)
        self._intake.steps.load(checkpoint.fitted(state, describe(self.recipe)))

    def _meet(self, what: str) -> Steps:
        """The steps, once no bucket is under way and all ranks have come here."""
        self._intake.lane.wait()
        self._intake.peers.meet(what)
        return self._intake.steps

    def _plugged(self) -> Socket:
        if self._socket is None:
            raise RuntimeError("this session is detached; attach the recipe again")
        return self._socket
