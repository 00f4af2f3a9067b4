"""A Session is what `attach` and `distribute` return: a recipe at work in one training loop.

The object for the loop's owner: figures, checkpoints, pauses. Buckets go another way, from a socket
(DDP's hook, or gradient hooks) into an `Intake`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol, Self, TypedDict

from thinwire.choose import Choose, forget
from thinwire.combinators import dense_form
from thinwire.comm.throttled import Throttled
from thinwire.deliver import hand_over
from thinwire.describe import describe, parts, rebuilt, spell
from thinwire.engine import checkpoint
from thinwire.engine.lane import Intake
from thinwire.engine.momentum import Moved
from thinwire.engine.steps import Steps
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

    def __init__(
        self, intake: Intake, socket: Socket, moved: Moved | None, story: Callable[[], str]
    ) -> None:
        self._intake = intake
        self._socket: Socket | None = socket
        self._moved, self._story = moved, story
        if moved is not None:
            moved.begin(self._slots)

    @property
    def recipe(self) -> Reducer:
        return self._intake.recipe

    @property
    def attached(self) -> bool:
        return self._socket is not None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self.attached:
            self.detach()

    def __repr__(self) -> str:
        comm, now = self._intake.peers.comm, self.metrics()
        state = "attached" if self.attached else "detached"
        fewer = now["bytes_dense"] / now["bytes_sent"] if now["bytes_sent"] else 1.0
        return (
            f"<thinwire.Session {state}: {spell(self.recipe)}, rank {comm.rank} of {comm.size}, "
            f"{now['steps']} steps, {fewer:.1f} times fewer bytes than dense>"
        )

    def explain(self) -> str:
        """The recipe, what `tuned` made of it, and what recorded trainings say it costs.

        Example:
            >>> print(sync.explain())  # doctest: +SKIP
        """
        return self._story()

    def synchronize(self) -> None:
        """Gradients are averages when this returns: call it before clipping them.

        Example:
            >>> sync.synchronize()  # doctest: +SKIP
            >>> torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)  # doctest: +SKIP
        """
        self._plugged().synchronize()

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes inside only accumulate; the first one outside sends the sum.

        Example:
            >>> with sync.no_sync():  # doctest: +SKIP
            ...     loss.backward()
        """
        return self._plugged().no_sync()

    def join(self) -> AbstractContextManager[object]:
        """Train inside with uneven inputs: ranks that run out play along until all have.

        Example:
            >>> with sync.join():  # doctest: +SKIP
            ...     train_epoch(loader)
        """
        return self._plugged().join()

    def pause(self) -> None:
        """Average densely from the next step on, delivering what was held back. On all ranks.

        Momentum that a tuned recipe has moved is the optimizer's again.

        Example:
            >>> sync.pause()  # doctest: +SKIP
        """
        steps, form = self._meet("pause()"), dense_form(self.recipe)
        if self._moved is not None:
            form = rebuilt(form, hand_over)
            with self._intake.peers.apart() as comm:
                self._moved.move_back(comm)
        steps.recipe = form

    def resume(self) -> None:
        """Compress again from the next step on. On all ranks.

        Example:
            >>> sync.resume()  # doctest: +SKIP
        """
        self._meet("resume()").recipe = self.recipe
        if self._moved is not None:
            self._moved.begin(self._slots)

    def replan(self) -> None:
        """Let a recipe that chooses, as `auto` does, choose anew from the next step on. On all
        ranks.

        Example:
            >>> sync.replan()  # doctest: +SKIP
        """
        if not any(isinstance(part, Choose) for part in parts(self.recipe)):
            raise ValueError("this recipe makes no choice that could be made anew; auto does")
        forget(self._meet("replan()").root.get("slots", {}))

    def detach(self) -> None:
        """Leave the training loop as it was. To deliver the residual, and momentum that a tuned
        recipe has moved, pause for one step before.

        Example:
            >>> sync.detach()  # doctest: +SKIP
        """
        self._intake.lane.settle()
        if self._moved is not None:
            self._moved.move_back(None)
        self._plugged().unplug()
        self._socket = None
        self._intake.leave()

    def metrics(self) -> Metrics:
        """Totals of this rank so far: steps, bytes, density achieved, seconds by phase.

        Example:
            >>> sync.metrics()["bytes_sent"]  # doctest: +SKIP
        """
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

        Example:
            >>> torch.save(sync.state_dict(), f"sync-{rank}.pt")  # doctest: +SKIP
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
            **checkpoint.copy_trees(steps.root),
        }
        return checkpoint.sign(state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict()` of the same rank in a world of the same size. On all ranks.

        Args:
            state: What `state_dict()` returned.

        Example:
            >>> sync.load_state_dict(torch.load(f"sync-{rank}.pt"))  # doctest: +SKIP
        """
        self._intake.lane.wait()
        peers, here = self._intake.peers, "load_state_dict()"
        try:
            checkpoint.check(state, peers.comm.rank, peers.comm.size, self._intake.slots)
        except ValueError as error:
            peers.refuse(here, error)
            raise
        peers.meet(here)
        self._intake.steps.load(checkpoint.keep_residual(state, describe(self.recipe)))

    def _slots(self) -> dict[str, Any]:
        """The state of every parameter."""
        slots: dict[str, Any] = self._intake.steps.root.setdefault("slots", {})
        return slots

    def _meet(self, what: str) -> Steps:
        """The steps, once no bucket is under way and all ranks have come here."""
        self._intake.lane.wait()
        self._intake.peers.meet(what)
        return self._intake.steps

    def _plugged(self) -> Socket:
        if self._socket is None:
            raise RuntimeError("this session is detached; attach the recipe again")
        return self._socket


def throttle(session: Session, rate: float) -> None:
    """Slow the exchange down to a link of `rate` bits per second, as in `thinwire demo`.

    For studies without a slow network. Call it right after `attach`, on all ranks.
    """
    intake = session._intake
    intake.steps.comm = Throttled(intake.peers.comm, rate)
