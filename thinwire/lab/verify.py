"""Predicted steps beside measured ones, in shaped networks: `thinwire plan --verify`.

For every model and number of workers the profile is taken once, on loopback; for every network the
links are probed, the steps predicted, and then measured.
"""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from thinwire import kernels, recipes
from thinwire.comm.torch import TorchComm
from thinwire.engine.ddp import attach
from thinwire.lab import models, workers
from thinwire.plan import network, planner, profile
from thinwire.plan.network import Network

RECIPES = ("dense()", "adtopk(density=0.01)", "oktopk(density=0.01)", "acpsgd(rank=4)")
SECONDS = 6.0  # to measure one cell, if three steps fit into it
STEPS = (3, 15)


@dataclass(frozen=True, kw_only=True)
class Profiled:
    """A model on so many workers: its own step, its buckets, and what each recipe costs."""

    model: profile.Model
    groups: list[list[str]]
    costs: dict[str, list[profile.Cost]]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One prediction and what came of it, in seconds a step."""

    model: str
    workers: int
    net: str
    recipe: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        return abs(self.predicted - self.measured) / self.measured


def profiled(model: str, batch: int, world: int, calls: tuple[str, ...] = RECIPES) -> Profiled:
    """On loopback, all workers at once."""
    result: Profiled = workers.run(world, _profile, model, batch, calls)[0]
    return result


def measured(
    model: str, batch: int, world: int, net: str, found: Profiled, links: Network | None = None
) -> tuple[list[Cell], Network]:
    """The cells of one network, and its probe."""
    steps, links = workers.run(world, _measure, model, batch, tuple(found.costs), links, net=net)[0]
    cores = (os.cpu_count() or 1) / world
    cells = []
    for call, seconds in steps.items():
        guess = planner.predicted(call, found.model, found.groups, found.costs[call], links, cores)
        cells.append(Cell(model=model, workers=world, net=net, recipe=call,
                          predicted=guess.step, measured=seconds))  # fmt: skip
    return cells, links


def _profile(rank: int, world: int, report: Any, model: str, batch: int, calls: Any) -> Profiled:
    torch.manual_seed(0)
    kernels.warm()
    comm = TorchComm(dist.group.WORLD)  # type: ignore[arg-type]
    net, inputs = models.make(model, batch)
    found = profile.model(net, inputs, models.loss_of, comm)
    groups = profile.buckets(found)
    layouts = planner.layouts(found, groups)
    costs = {call: profile.costs(recipes.parse(call), layouts, comm) for call in calls}
    return Profiled(model=found, groups=groups, costs=costs)


def _measure(
    rank: int, world: int, report: Any, model: str, batch: int, calls: Any, links: Network | None
) -> tuple[dict[str, float], Network]:
    comm = TorchComm(dist.group.WORLD)  # type: ignore[arg-type]
    links = links or network.probe(comm)
    return {call: _step(call, model, batch, comm) for call in calls}, links


def _step(call: str, model: str, batch: int, comm: TorchComm) -> float:
    """The median step with this recipe attached."""
    torch.manual_seed(0)
    net, inputs = models.make(model, batch)
    ddp = DistributedDataParallel(net, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
    sync = attach(ddp, recipes.parse(call), optimizer=optimizer)

    def step() -> float:
        dist.barrier()
        begin = time.perf_counter()
        models.loss_of(ddp(*inputs)).backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - begin

    first = [step() for _ in range(3)]  # DDP makes its buckets anew after the first
    mine = torch.tensor([first[-1]], dtype=torch.float64)
    length = float(profile.averaged(mine, comm))
    count = max(STEPS[0], min(STEPS[1], round(SECONDS / length)))
    taken = torch.tensor([statistics.median(step() for _ in range(count))], dtype=torch.float64)
    sync.detach()
    return float(profile.averaged(taken, comm))
