"""Local workers that find out what a plan needs: the model's profile, recipes' costs, the links."""

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
from thinwire.jobs import launch
from thinwire.lab import models, workers
from thinwire.plan import network, planner, profile
from thinwire.plan.network import Network

VISITS, STEPS = 3, 3  # of every recipe, and steps each that count


@dataclass(frozen=True, kw_only=True)
class Profiled:
    """A model on so many workers: its own step, its buckets, what each recipe costs, the links."""

    model: profile.Model
    groups: list[list[str]]
    costs: dict[str, list[profile.Cost]]
    world: int
    links: Network | None = None

    def setup(self, links: Network, cores: float) -> planner.Setup:
        return planner.Setup(model=self.model, groups=self.groups, network=links, cores=cores)


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is to be found out; `probe` says whether the links are to be measured too."""

    model: str
    batch: int = 16
    recipes: tuple[str, ...] = ("dense()",)
    bucket_mb: float = 25.0
    probe: bool = False


def profiled(
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
            dist.destroy_process_group()
    result: Profiled = workers.run(world, _look, question, on_report=on_report)[0]
    return result


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
            raise workers.Refused(f"{call}: {error}") from None
    found = profile.model(net, inputs, models.loss_of, comm)
    del net
    report("model") if rank == 0 else None
    groups = profile.buckets(found, question.bucket_mb)
    layouts = planner.layouts(found, groups)
    visits: dict[str, list[list[profile.Cost]]] = {call: [] for call in question.recipes}
    for visit in range(VISITS):  # of all in turn, so that a bad moment is nobody's alone
        for call in question.recipes:
            visits[call].append(profile.costs(recipes.parse(call), layouts, comm, STEPS))
            report(call) if rank == 0 and visit == VISITS - 1 else None
    costs = {
        call: [profile.middle(same) for same in zip(*found_in, strict=True)]
        for call, found_in in visits.items()
    }
    return Profiled(model=found, groups=groups, costs=costs, world=world, links=links)
