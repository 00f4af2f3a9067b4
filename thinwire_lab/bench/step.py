"""How long a training step takes under a recipe, beside its references, in one run.

One contender after the other, so that no more than one model with its residuals is in memory;
figures are medians.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thinwire import recipes
from thinwire.engine.ddp import attach
from thinwire.plan import units
from thinwire_lab.bench import models
from thinwire_lab.local import workers
from thinwire_lab.runs.baselines import BASELINES, Baseline


@dataclass(frozen=True, kw_only=True)
class Row:
    """One contender's figures on rank 0."""

    name: str
    seconds: float  # a step, median
    bytes_sent: float  # a step
    bytes_dense: float
    exposed: float  # seconds a step that backward waited for the exchange


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What is measured, how often, over which network."""

    model: str = "small"
    batch: int = 16
    bucket_mb: float = 25.0
    net: str = "none"
    rounds: int = 6
    steps: int = 5  # a turn


def measure(
    calls: list[str],
    world: int,
    trial: Trial,
    on_report: Callable[[tuple[str, int]], None] = lambda message: None,
) -> list[Row]:
    """A row for each reference and each recipe."""
    for call in calls:
        recipes.parse(call)  # a bad call is the caller's error, before any process is started
    models.maker(trial.model)
    if trial.net != "none":
        units.rate(trial.net)
    result: list[Row] = workers.run(
        world, _worker, calls, trial, on_report=on_report, net=trial.net
    )[0]
    return result


class _WithRecipe:
    """A DDP model with a recipe, seen as a baseline is."""

    def __init__(
        self, call: str, net: nn.Module, optimizer: torch.optim.Optimizer, mb: float
    ) -> None:
        self.model = DistributedDataParallel(net, gradient_as_bucket_view=True, bucket_cap_mb=mb)
        self.sync = attach(self.model, recipes.parse(call), optimizer=optimizer)

    def backward(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def finish(self) -> None:
        """The mean is there when backward ends."""


class _Contender:
    def __init__(self, name: str, trial: Trial) -> None:
        torch.manual_seed(0)
        self.name = name
        net, self._inputs = models.make(trial.model, trial.batch)
        self._numel = sum(p.numel() for p in net.parameters())
        self._optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        self._way = (
            Baseline(name, net, trial.bucket_mb)
            if name in BASELINES
            else _WithRecipe(name, net, self._optimizer, trial.bucket_mb)
        )
        self.seconds: list[float] = []

    def turn(self, steps: int) -> None:
        dist.barrier()
        for _ in range(steps):
            begin = time.perf_counter()
            with self._way.backward():
                models.loss_of(self._way.model(*self._inputs)).backward()
            self._way.finish()
            self._optimizer.step()
            self._optimizer.zero_grad()
            self.seconds.append(time.perf_counter() - begin)

    def close(self) -> None:
        if isinstance(self._way, _WithRecipe):
            self._way.sync.detach()

    def row(self, world: int) -> Row:
        exposed = float("nan")
        if isinstance(self._way, _WithRecipe):
            metrics = self._way.sync.metrics()
            sent = metrics["bytes_sent"] / metrics["steps"]
            exposed = metrics["seconds_exposed"] / metrics["steps"]
        else:
            sent = self._way.bytes_sent
        return Row(
            name=self.name,
            seconds=statistics.median(self.seconds),
            bytes_sent=sent,
            bytes_dense=2 * (world - 1) / world * 4 * self._numel,
            exposed=exposed,
        )


def _worker(rank: int, world: int, report: Any, calls: list[str], trial: Trial) -> list[Row]:
    rows = []
    for name in (*BASELINES, *calls):
        contender = _Contender(name, trial)
        contender.turn(3)  # buckets are rebuilt after the first step
        contender.seconds.clear()
        for number in range(trial.rounds):
            contender.turn(trial.steps)
            if rank == 0:
                report((name, number + 1))
        rows.append(contender.row(world))
        contender.close()
        del contender
        gc.collect()  # DDP and its hook hold each other
    return rows
