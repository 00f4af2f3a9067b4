"""From measurements to a choice: what each recipe would make of a step, and which is best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from thinwire.layout import Layout
from thinwire.plan.network import Network
from thinwire.plan.profile import Cost, Model
from thinwire.plan.timeline import Timeline, Work, replay


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A step under a recipe, as the timeline has it."""

    recipe: str
    timeline: Timeline
    sent: float  # bytes a rank a step

    @property
    def step(self) -> float:
        return self.timeline.step


def layouts(model: Model, groups: Sequence[Sequence[str]]) -> list[Layout]:
    """The layouts of buckets of these parameters."""
    return [
        Layout.of({name: torch.empty(model.shapes[name], device="meta") for name in group})
        for group in groups
    ]


def predicted(
    recipe: str,
    model: Model,
    groups: Sequence[Sequence[str]],
    costs: Sequence[Cost],
    network: Network,
    cores: float,
) -> Prediction:
    """The step of a model whose buckets cost so much each."""
    backward = dict(model.backward)
    works = []
    for number, (group, cost) in enumerate(zip(groups, costs, strict=True)):
        wire = sum(network.seconds(verb, sent) for verb, sent in cost.calls) / cost.steps
        works.append(
            Work(
                name=f"bucket {number}",
                backward=sum(backward[name] for name in group),
                select=cost.select,
                wire=wire,
                effort=cost.effort,
                scatter=cost.scatter,
            )
        )
    timeline = replay(works, forward=model.forward, optimizer=model.optimizer, cores=cores)
    sent = sum(sent for cost in costs for _, sent in cost.calls) / costs[0].steps
    return Prediction(recipe=recipe, timeline=timeline, sent=sent)
