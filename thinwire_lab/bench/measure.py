"""Measures what a plan needs, with local workers: a model's step, recipes' costs, the links."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from thinwire import kernels, recipes
from thinwire.comm.torch import TorchComm
from thinwire.engine.checks import check_patterns
from thinwire.plan import network, planner, profile
from thinwire.plan.network import Network
from thinwire.protocols import Reducer
from thinwire.recipes.tuned import Tuned
from thinwire_lab.bench import models
from thinwire_lab.errors import Refused
from thinwire_lab.local import workers
from thinwire_lab.runs import launch

VISITS, STEPS = 3, 3  # of every recipe, and steps each that count
MOMENTUM = 0.9  # of the SGD that tuned recipes are measured for


@dataclass(frozen=True, kw_only=True)
class Profiled:
    """What was found with so many workers: the model's step, buckets, recipes' costs, the links."""

    model: profile.Model
    groups: list[list[str]]
    costs: dict[str, list[profile.Cost]]
    world: int
    links: Network | None = None  # if they were asked for

    def setup(self, links: Network, cores: float) -> planner.Setup:
        """For these links, and so many cores per worker."""
        return planner.Setup(model=self.model, groups=self.groups, network=links, cores=cores)


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is to be found out; with `probe` the links too. Schedules are averaged over `steps`,
    and tuned recipes are those for Adam, or for SGD with momentum."""

    model: str
    batch: int = 16
    recipes: tuple[str, ...] = ("dense()",)
    bucket_mb: float = 25.0
    probe: bool = False
    steps: int = 1000
    adam: bool = False


def candidates(steps: int) -> tuple[str, ...]:
    """What is compared unless --recipe says otherwise: calls that evidence knows, and a few known
    for their speed."""
    momentum = "memory=MomentumCorrected(learning_rate=True)"
    return (
        "bf16()", "int8()", "int4()",
        f"tuned(saving=16, steps={steps})", f"tuned(saving=28, steps={steps})",
        f'powersgd(rank=Piecewise(({steps - 1},), (8, 64)), {momentum}, wire="bf16")',
        "acpsgd(rank=4)", "powersgd(rank=4)", "topk(density=0.01)",
    )  # fmt: skip


def ask(
    question: Question, world: int, on_report: Callable[[Any], None] = lambda message: None
) -> Profiled:
    """With local workers on loopback, or in the group that a launcher has started us in."""
    for call in question.recipes:
        recipes.parse(call)  # a bad call is the caller's error, before any process is started
    models.maker(question.model)
    if launched():
        place = launch.join()
        try:
            return _look(place.rank, place.world, on_report, question)
        finally:
            launch.leave()
    return workers.run(world, _look, question, on_report=on_report)[0]


def launched() -> bool:
    """Whether torchrun, or something like it, has started us as one of many."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ


def _look(rank: int, world: int, report: Callable[[Any], None], question: Question) -> Profiled:
    torch.manual_seed(0)
    kernels.warm()
    comm = TorchComm(dist.group.WORLD)  # type: ignore[arg-type]
    profile.agree("question", repr(question), comm)
    links = network.probe(comm) if question.probe else None
    report("links") if rank == 0 else None
    net, inputs = models.make(question.model, question.batch)
    for call in question.recipes:
        try:
            check_patterns(recipes.parse(call), dict(net.named_parameters()))
        except ValueError as error:
            raise Refused(f"{call}: {error}") from None
    found = profile.measure_model(net, inputs, models.loss_of, comm)
    del net
    report("model") if rank == 0 else None
    groups = profile.buckets(found, question.bucket_mb)
    layouts = planner.layouts(found, groups)
    visits: dict[str, list[list[profile.Cost]]] = {call: [] for call in question.recipes}
    for visit in range(VISITS):  # of all in turn, so that a bad moment is nobody's alone
        for call in question.recipes:
            recipe = profile.freeze(_complete(call, question, found, world), question.steps)
            visits[call].append(profile.measure_costs(recipe, layouts, comm, STEPS))
            report(call) if rank == 0 and visit == VISITS - 1 else None
    costs = {
        call: [profile.median_cost(same) for same in zip(*found_in, strict=True)]
        for call, found_in in visits.items()
    }
    return Profiled(model=found, groups=groups, costs=costs, world=world, links=links)


def _complete(call: str, question: Question, model: profile.Model, world: int) -> Reducer:
    """A tuned recipe as an optimizer of this kind would get it."""
    recipe = recipes.parse(call)
    if not isinstance(recipe, Tuned):
        return recipe
    numel = sum(shape.numel() for shape in model.shapes.values())
    momentum = 0.0 if question.adam else MOMENTUM
    return recipe.choose(world, numel, adam=question.adam, momentum=momentum)
