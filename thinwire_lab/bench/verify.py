"""Predicted steps beside measured ones, in shaped networks: `thinwire plan --verify`.

For every model and number of workers the profile is taken once, on loopback; for every network the
links are probed, the steps predicted, and then measured. Every cell is written to a file as it
comes, and a run that was broken off goes on behind the last.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from thinwire import recipes
from thinwire.choose import Choose, average_over_ranks
from thinwire.comm.torch import TorchComm
from thinwire.describe import parts
from thinwire.engine.ddp import attach
from thinwire.plan import network, planner
from thinwire.plan.network import Network
from thinwire_lab.bench import models
from thinwire_lab.bench.measure import Profiled, Question, ask
from thinwire_lab.local import workers

RECIPES = ("dense()", "adtopk(density=0.01)", "slots(density=0.01)", "acpsgd(rank=4)")
MODELS, WORLDS, NETS = ("mlp", "vgg16"), (2, 4, 8), ("100mbit", "1gbit", "10gbit")
AUTO = 'auto(among=("adtopk", "acpsgd", "slots", "dense"))'
TURNS = 3
SECONDS = 5.0  # to measure one cell, if a step per turn fits into it
STEPS = 5  # per turn at most
NEAR = 0.10  # of the best measured step: close enough to count as the winner


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One prediction and what came of it, in seconds per step."""

    model: str
    workers: int
    net: str
    recipe: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        return abs(self.predicted - self.measured) / self.measured

    @property
    def place(self) -> tuple[str, int, str]:
        return self.model, self.workers, self.net


@dataclass(frozen=True, kw_only=True)
class Score:
    """How good the predictions were: median error, and in how many places the right recipe (or one
    within a tenth of it) was foreseen; how many times the best step `auto` took at most."""

    error: float
    right: int
    places: int
    auto: float


def verify(
    path: Path,
    batch: int = 16,
    on_cell: Callable[[Cell], None] = lambda cell: None,
    places: Iterable[tuple[str, int, str]] | None = None,
) -> list[Cell]:
    """Every cell that is not in the file yet, and those that are."""
    cells = read(path)
    for cell in cells:
        on_cell(cell)
    known: dict[tuple[str, int], Profiled] = {}
    every = places or [(model, world, net) for model in MODELS for world in WORLDS for net in NETS]
    for model, world, net in every:
        if (model, world, net) in {cell.place for cell in cells}:
            continue
        if (model, world) not in known:
            question = Question(model=model, batch=batch, recipes=RECIPES)
            known[model, world] = ask(question, world)
        for cell in measure_place(model, batch, net, known[model, world]):
            cells.append(cell)
            on_cell(cell)
            with path.open("a") as file:
                file.write(json.dumps(asdict(cell)) + "\n")
    return cells


def read(path: Path) -> list[Cell]:
    """The cells that a file has; a line that was cut off in the middle is left out."""
    cells = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            cells.append(Cell(**json.loads(line)))
        except (ValueError, TypeError):
            continue
    whole = {cell.place for cell in cells if cell.recipe == AUTO}
    return [cell for cell in cells if cell.place in whole]


def score(cells: list[Cell]) -> Score:
    places = sorted({cell.place for cell in cells})
    fixed = [cell for cell in cells if cell.recipe != AUTO]
    right, slowest = 0, 0.0
    for place in places:
        here = [cell for cell in fixed if cell.place == place]
        best = min(cell.measured for cell in here)
        picked = min(here, key=lambda cell: cell.predicted)
        right += picked.measured <= (1 + NEAR) * best
        found = [cell.measured for cell in cells if cell.place == place and cell.recipe == AUTO]
        slowest = max([slowest, *(seconds / best for seconds in found)])
    error = statistics.median(cell.error for cell in fixed)
    return Score(error=error, right=right, places=len(places), auto=slowest)


def measure_place(model: str, batch: int, net: str, found: Profiled) -> list[Cell]:
    """The cells of one network."""
    world, calls = found.world, tuple(found.costs)
    steps, links = workers.run(world, _measure, model, batch, calls, net=net)[0]
    setup = found.setup(links, (os.cpu_count() or 1) / world)
    guesses = {call: planner.predict(call, setup, found.costs[call]).step for call in found.costs}
    guesses[AUTO] = min(guesses.values())
    return [
        Cell(model=model, workers=world, net=net, recipe=call, predicted=guesses[call],
             measured=seconds)
        for call, seconds in steps.items()
    ]  # fmt: skip


def _measure(
    rank: int, world: int, report: Any, model: str, batch: int, calls: tuple[str, ...]
) -> tuple[dict[str, float], Network]:
    """The median step of every recipe; they take turns, so that noise hits all alike."""
    comm = TorchComm(dist.group.WORLD)  # type: ignore[arg-type]
    links = network.probe(comm)
    contenders = [_Contender(call, model, batch, comm) for call in (*calls, AUTO)]
    for _ in range(TURNS):
        for contender in contenders:
            contender.turn()
    return {contender.call: contender.median() for contender in contenders}, links


class _Contender:
    """A model with a recipe attached, past its first steps."""

    def __init__(self, call: str, model: str, batch: int, comm: TorchComm) -> None:
        torch.manual_seed(0)
        self.call, self._comm = call, comm
        net, self._inputs = models.make(model, batch)
        self._ddp = DistributedDataParallel(net, gradient_as_bucket_view=True)
        self._optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
        recipe = recipes.parse(call)
        attach(self._ddp, recipe, optimizer=self._optimizer)
        plans = [part for part in parts(recipe) if isinstance(part, Choose)]
        trials = sum(plan.longest for plan in plans)
        first = [self._step() for _ in range(trials + 3)]  # buckets are made anew after the first
        length = average_over_ranks([first[-1]], comm)[0]
        self._count = max(1, min(STEPS, round(SECONDS / length / TURNS)))
        self._taken: list[float] = []

    def turn(self) -> None:
        self._taken += [self._step() for _ in range(self._count)]

    def median(self) -> float:
        return average_over_ranks([statistics.median(self._taken)], self._comm)[0]

    def _step(self) -> float:
        dist.barrier()
        begin = time.perf_counter()
        models.loss_of(self._ddp(*self._inputs)).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return time.perf_counter() - begin
