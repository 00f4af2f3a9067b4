"""What a training counts as it goes: losses, seconds, bytes, and whether all agree to stop."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

SHOWN = 20  # steps whose losses are averaged at both ends


class Tally:
    """Mean losses of all ranks, and the wish to stop, ride on one small sum per step.

    It starts when a step has ended and is read after the next one, so that nobody waits for it and
    all ranks stop after the same step.
    """

    def __init__(self, world: int) -> None:
        self._group = dist.new_group(backend="gloo")
        self._world = world
        self.stopping = False
        self._before: dict[str, Any] = {}  # what processes have sent that this one goes on from
        self.seconds = 0.0  # of training: without scoring and saving
        self._losses: list[float] = []
        self._each: list[float] = []  # seconds of every step
        self._begin = 0.0
        self._pending: tuple[Any, Tensor, dict[str, Any]] | None = None

    def begin(self) -> None:
        self._begin = time.perf_counter()

    def end(self, loss: Tensor, stop: bool, counts: dict[str, Any]) -> list[dict[str, Any]]:
        """End a step, and give the records of steps before it that are complete now."""
        known = self.flush()
        both = torch.tensor([float(loss), float(stop)], dtype=torch.float64)
        work = dist.all_reduce(both, group=self._group, async_op=True)
        self._each.append(time.perf_counter() - self._begin)
        self.seconds += self._each[-1]
        times = {"elapsed": self.seconds, "seconds": self._each[-1]}
        self._pending = work, both, counts | times
        return known

    def flush(self) -> list[dict[str, Any]]:
        """The record of the last step, with the mean loss of all ranks, unless it was given."""
        if self._pending is None:
            return []
        work, both, record = self._pending
        work.wait()
        self._pending = None
        self._losses.append(float(both[0]) / self._world)
        self.stopping = self.stopping or bool(both[1] > 0)
        return [{**record, "loss": self._losses[-1]}]

    def close(self) -> None:
        dist.destroy_process_group(self._group)

    def add_before(self, sent: dict[str, Any]) -> dict[str, Any]:
        """What this process has sent, and those before it: sums, and the density by steps."""
        before = self._before
        if not before:
            return sent
        steps = before["steps"] + sent["steps"]
        mixed = before["density"] * before["steps"] + sent["density"] * sent["steps"]
        sums = {k: before.get(k, 0) + n for k, n in sent.items() if k != "density"}
        return sums | {"density": mixed / steps if steps else 0.0}

    def outcome(self, sent: dict[str, Any]) -> dict[str, Any]:
        few = max(1, min(SHOWN, len(self._losses) // 3))
        return {
            "loss": statistics.mean(self._losses[-few:]) if self._losses else float("nan"),
            "first_loss": statistics.mean(self._losses[:few]) if self._losses else float("nan"),
            "seconds": self.seconds,
            "step_seconds": statistics.median(self._each),
            "metrics": sent,
        }

    def state(self, sent: dict[str, Any]) -> dict[str, Any]:
        """What `load` takes; the last step's record must have been given."""
        assert self._pending is None, "flush before you save"
        return {"seconds": self.seconds, "each": self._each, "losses": self._losses, "sent": sent}

    def load(self, state: dict[str, Any]) -> None:
        self.seconds, self._each = state["seconds"], list(state["each"])
        self._losses, self._before = list(state["losses"]), dict(state["sent"])
