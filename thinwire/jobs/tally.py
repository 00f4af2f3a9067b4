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
        self.bytes_before = 0
        self._before: dict[str, Any] = {}
        self._seconds_before = 0.0
        self._losses: list[float] = []
        self._seconds: list[float] = []
        self._begin = 0.0
        self._pending: tuple[Any, Tensor] | None = None

    @property
    def seconds(self) -> float:
        """Of training: without scoring and saving."""
        return self._seconds_before + sum(self._seconds)

    def begin(self) -> None:
        self._begin = time.perf_counter()

    def end(self, loss: Tensor, stop: bool) -> dict[str, float]:
        """Closes a step; what is known by now: its time, and the mean loss of the one before."""
        self._collect()
        both = torch.tensor([float(loss), float(stop)], dtype=torch.float64)
        self._pending = dist.all_reduce(both, group=self._group, async_op=True), both
        self._seconds.append(time.perf_counter() - self._begin)
        record = {"elapsed": self.seconds, "seconds": self._seconds[-1]}
        return record | ({"loss": self._losses[-1]} if self._losses else {})

    def _collect(self) -> None:
        if self._pending is None:
            return
        work, both = self._pending
        work.wait()
        self._pending = None
        self._losses.append(float(both[0]) / self._world)
        self.stopping = self.stopping or bool(both[1] > 0)

    def outcome(self, sent: dict[str, Any]) -> dict[str, Any]:
        self._collect()
        few = max(1, min(SHOWN, len(self._losses) // 3))
        return {
            "loss": statistics.mean(self._losses[-few:]) if self._losses else float("nan"),
            "first_loss": statistics.mean(self._losses[:few]) if self._losses else float("nan"),
            "seconds": self.seconds,
            "step_seconds": statistics.median(self._seconds) if self._seconds else 0.0,
            "metrics": _together(self._before, sent),
        }

    def state(self, sent: dict[str, Any]) -> dict[str, Any]:
        self._collect()
        return {
            "seconds": self.seconds, "losses": self._losses, "sent": _together(self._before, sent)
        }  # fmt: skip

    def load(self, state: dict[str, Any], step: int) -> None:
        self._seconds_before, self._losses = state["seconds"], list(state["losses"])
        self._before, self.resumed = dict(state["sent"]), step
        self.bytes_before = int(self._before["bytes_sent"])


def _together(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """Figures of both parts of a resumed run: sums, and the density by steps."""
    if not before:
        return now
    steps = before["steps"] + now["steps"]
    mixed = before["density"] * before["steps"] + now["density"] * now["steps"]
    seconds = {k: before["seconds"].get(k, 0.0) + v for k, v in now["seconds"].items()}
    sums = {k: before[k] + n for k, n in now.items() if isinstance(n, int)}
    return sums | {"density": mixed / steps if steps else 0.0, "seconds": seconds}
