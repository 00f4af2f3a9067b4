"""How long a training step takes under a recipe, beside its references, in one run.

One contender after the other, so that no more than one model with its residuals is in memory;
figures are medians.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from thinwire import recipes
from thinwire.engine.ddp import attach
from thinwire.plan import units
from thinwire_lab.bench import models
from thinwire_lab.local import workers
from thinwire_lab.runs.baselines import BASELINES, PLAIN, Baseline


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
    return workers.run(world, _worker, calls, trial, on_report=on_report, net=trial.net)[0]


def _worker(rank: int, world: int, report: Any, calls: list[str], trial: Trial) -> list[Row]:
    rows = []
    for name in (*BASELINES, *calls):
        rows.append(_measure_one(name, trial, report))
        gc.collect()  # DDP and its hook hold each other
    return rows


def _measure_one(name: str, trial: Trial, report: Callable[[tuple[str, int]], None]) -> Row:
    """One contender, in a model of its own."""
    torch.manual_seed(0)
    net, inputs = models.make(trial.model, trial.batch)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    baseline = Baseline(name if name in BASELINES else PLAIN, net, trial.bucket_mb)
    recipe = None if name in BASELINES else recipes.parse(name)
    sync = None if recipe is None else attach(baseline.model, recipe, optimizer=optimizer)

    def turn(steps: int) -> Iterator[float]:
        """Seconds of every step."""
        dist.barrier()
        for _ in range(steps):
            begin = time.perf_counter()
            with baseline.backward():
                models.loss_of(baseline.model(*inputs)).backward()
            baseline.finish()
            optimizer.step()
            optimizer.zero_grad()
            yield time.perf_counter() - begin

    for _ in turn(3):  # buckets are rebuilt after the first step
        pass
    seconds: list[float] = []
    for number in range(trial.rounds):
        seconds += turn(trial.steps)
        if dist.get_rank() == 0:
            report((name, number + 1))
    sent, exposed = baseline.bytes_sent, float("nan")
    if sync is not None:
        metrics = sync.metrics()
        sent = metrics["bytes_sent"] / metrics["steps"]
        exposed = metrics["seconds_exposed"] / metrics["steps"]
        sync.detach()
    numel, world = sum(p.numel() for p in net.parameters()), dist.get_world_size()
    return Row(
        name=name, seconds=statistics.median(seconds), bytes_sent=sent,
        bytes_dense=2 * (world - 1) / world * 4 * numel, exposed=exposed,
    )  # fmt: skip
