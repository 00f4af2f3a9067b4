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
    """Mean losses of all ranks, and the wish to stop, ride on one small sum a step.

    It is asked for when a step has ended and read after the next one, so that nobody waits for it
    and all ranks stop after the same step.
    """

    def __init__(self, world: int, numel: int) -> None:
        self._group = dist.new_group(backend="gloo")
        self._world = world
        self.dense_bytes = int(2 * (world - 1) / world * 4 * numel)
        self.stopping = False
        self.resumed = 0  # steps that another process has taken
        self._before: dict[str, Any] = {}
        self.seconds = 0.0  # of training: without scoring and saving
        self._losses: list[float] = []
        self._each: list[float] = []  # seconds of every step
        self._begin = 0.0
        self._pending: tuple[Any, Tensor, dict[str, Any]] | None = None

    def begin(self) -> None:
        self._begin = time.perf_counter()

    def end(self, loss: Tensor, stop: bool, counts: dict[str, Any]) -> list[dict[str, Any]]:
        """Closes a step. What is known by now are records of the steps before it."""
        known = self.flush()
        both = torch.tensor([float(loss), float(stop)], dtype=torch.float64)
        work = dist.all_reduce(both, group=self._group, async_op=True)
        self._each.append(time.perf_counter() - self._begin)
        self.seconds += self._each[-1]
        self._pending = work, both, {
            **counts, "elapsed": self.seconds, "seconds": self._each[-1]
        }  # fmt: skip
        return known

    def flush(self) -> list[dict[str, Any]]:
        """The record of the last step, with the mean loss of all ranks, if it was not told yet."""
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

    def whole(self, sent: dict[str, Any]) -> dict[str, Any]:
        """With what was sent before the run was resumed."""
        return _together(self._before, sent)

    def outcome(self, sent: dict[str, Any]) -> dict[str, Any]:
        few = max(1, min(SHOWN, len(self._losses) // 3))
        return {
            "loss": statistics.mean(self._losses[-few:]) if self._losses else float("nan"),
            "first_loss": statistics.mean(self._losses[:few]) if self._losses else float("nan"),
            "seconds": self.seconds,
            "step_seconds": statistics.median(self._each),
            "metrics": _together(self._before, sent),
        }

    def state(self, sent: dict[str, Any]) -> dict[str, Any]:
        """For `load`; everything must have been told."""
        assert self._pending is None, "flush before you save"
        return {
            "seconds": self.seconds, "each": self._each, "losses": self._losses,
            "sent": self.whole(sent),
        }  # fmt: skip

    def load(self, state: dict[str, Any], step: int) -> None:
        self.seconds, self._each = state["seconds"], list(state["each"])
        self._losses = list(state["losses"])
        self._before, self.resumed = dict(state["sent"]), step


def _together(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """Figures of both parts of a resumed run: sums, and the density by steps."""
    if not before:
        return now
    steps = before["steps"] + now["steps"]
    mixed = before["density"] * before["steps"] + now["density"] * now["steps"]
    sums = {k: before.get(k, 0) + n for k, n in now.items() if k != "density"}
    return sums | {"density": mixed / steps if steps else 0.0}
