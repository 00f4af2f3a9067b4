"""How long a training step takes under a recipe, beside its references, in one run.

The references: no communication at all, and plain DDP. Contenders take turns, a few steps each,
so that whatever else the machine does hits all of them alike; figures are medians.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thinwire import recipes
from thinwire.engine.ddp import attach
from thinwire.lab import workers

ALONE = "no communication"
PLAIN = "plain DDP"


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
    """What is measured: an MLP, and how often."""

    layers: int = 8
    width: int = 512
    batch: int = 16
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
    result: list[Row] = workers.run(world, _worker, calls, trial, on_report=on_report)[0]
    return result


class _Contender:
    def __init__(self, name: str, trial: Trial, rank: int) -> None:
        torch.manual_seed(0)
        layers = [nn.Linear(trial.width, trial.width) for _ in range(trial.layers)]
        self.name = name
        self._net = nn.Sequential(*layers)
        self._model = DistributedDataParallel(self._net, gradient_as_bucket_view=True)
        self._optimizer = torch.optim.SGD(self._net.parameters(), lr=0.01)
        self._sync = None
        if name not in (ALONE, PLAIN):
            recipe = recipes.parse(name)
            self._sync = attach(self._model, recipe, optimizer=self._optimizer)
        self._batch = torch.randn(trial.batch, trial.width)
        self.seconds: list[float] = []

    def turn(self, steps: int) -> None:
        for _ in range(steps):
            begin = time.perf_counter()
            alone = self._model.no_sync() if self.name == ALONE else nullcontext()
            with alone:
                self._model(self._batch).pow(2).mean().backward()
            self._optimizer.step()
            self._optimizer.zero_grad()
            self.seconds.append(time.perf_counter() - begin)

    def row(self, world: int) -> Row:
        numel = sum(p.numel() for p in self._net.parameters())
        dense = 2 * (world - 1) / world * 4 * numel
        sent, exposed = (0.0 if self.name == ALONE else dense), float("nan")
        if self._sync is not None:
            metrics = self._sync.metrics()
            sent = metrics["bytes_sent"] / metrics["steps"]
            exposed = metrics["seconds"]["exposed"] / metrics["steps"]
        return Row(
            name=self.name,
            seconds=statistics.median(self.seconds),
            bytes_sent=sent,
            bytes_dense=dense,
            exposed=exposed,
        )


def _worker(rank: int, world: int, report: Any, calls: list[str], trial: Trial) -> list[Row]:
    contenders = [_Contender(name, trial, rank) for name in (ALONE, PLAIN, *calls)]
    for contender in contenders:
        contender.turn(3)  # buckets are rebuilt after the first step
        contender.seconds.clear()
    for number in range(trial.rounds):
        for contender in contenders:
            contender.turn(trial.steps)
            if rank == 0:
                report((contender.name, number + 1))
    return [contender.row(world) for contender in contenders]
