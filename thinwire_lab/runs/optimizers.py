"""Optimizers and learning rates, as the papers have them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from thinwire.combinators import memories
from thinwire.describe import rebuilt
from thinwire.memory import MomentumCorrected
from thinwire.protocols import Reducer
from thinwire.recipes.tuned import Tuned, tuned
from thinwire_lab.jobs.job import Settings

BETTER = 1e-4  # share of the best score so far by which a better one is below it


def optimizer_of(
    net: nn.Module, settings: Settings, world: int, recipe: Reducer | None
) -> Optimizer:
    """What the settings ask for; without momentum where the recipe applies it. No decay on vectors.

    Every group remembers its highest rate as `base`. The optimizer's momentum multiplies weight
    decay too, by 1 / (1 - momentum) in the long run; without it the decay itself is so much larger.
    """
    own = corrects_momentum(recipe)
    momentum = 0.0 if own else settings.momentum
    sgd = settings.optimizer == "sgd"
    shrink = settings.weight_decay / (1 - settings.momentum if own and sgd else 1)
    rate = settings.rate * (world if settings.rate_by_workers else 1)
    decay = [p for p in net.parameters() if p.dim() > 1]
    plain = [p for p in net.parameters() if p.dim() <= 1]
    groups: list[dict[str, Any]] = [
        {"params": decay, "weight_decay": shrink},
        {"params": plain, "weight_decay": 0.0},
    ]
    groups = [group | {"base": rate} for group in groups if group["params"]]
    if settings.optimizer == "sign":
        return Sign(groups, lr=rate)
    if sgd:
        return torch.optim.SGD(groups, lr=rate, momentum=momentum)
    kind = torch.optim.Adam if settings.optimizer == "adam" else torch.optim.AdamW
    return kind(groups, lr=rate, betas=(momentum, 0.999), eps=settings.epsilon)


class Sign(Optimizer):
    """Every entry moves by the rate, against the sign of its gradient, and decays as in AdamW.

    What DeMo (`demo_dct`) means to be followed by; its momentum is the recipe's memory.
    """

    def __init__(self, params: ParamsT, lr: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    p.add_(p.grad.sign(), alpha=-group["lr"])


def corrects_momentum(recipe: Reducer | None) -> bool:
    """Whether the recipe applies momentum, so that the optimizer must not."""
    return recipe is not None and any(
        getattr(memory, "corrects_momentum", False) for memory in memories(recipe)
    )


def with_momentum(recipe: Reducer, settings: Settings, world: int) -> Reducer:
    """A recipe that applies momentum itself applies as much as the optimizer would have, unless
    it asks for another than the usual 0.9.

    It clips too: what it hands on is momentum of many steps, whose norm is no gradient's. One
    worker's gradient is larger than the average, by sqrt(workers) if noise is all, and is held at
    so much more; the memory divides by the root, since DGC means gradients that are added up.
    """
    if isinstance(recipe, Tuned):  # which moves momentum itself, if nothing clips
        clipped = recipe.clipped or settings.clip > 0
        return tuned(saving=recipe.saving, steps=recipe.steps, clipped=clipped)
    usual = MomentumCorrected()

    def change(part: Any) -> Any:
        if not isinstance(part, MomentumCorrected):
            return part
        momentum = settings.momentum if part.momentum == usual.momentum else part.momentum
        clip = settings.clip * world or None if part.clip is None else part.clip
        return replace(part, momentum=momentum, clip=clip)

    changed: Reducer = rebuilt(recipe, change)
    return changed


@dataclass
class Plateau:
    """A rate that falls whenever `patience` scores in a row, and one more, were no better.

    As torch's ReduceLROnPlateau does; ours knows which score it has heard, since a checkpoint may
    be of the moment before a score or of the one after.
    """

    best: float = math.inf
    waited: int = 0
    factor: float = 1.0
    heard: int = 0  # the step of the last score

    def add_score(self, settings: Settings, step: int, loss: float) -> None:
        """The score of a step, less is better."""
        if step <= self.heard:
            return
        self.heard = step
        limit = self.best - BETTER * abs(self.best) if self.best < math.inf else math.inf
        self.best, self.waited = (loss, 0) if loss < limit else (self.best, self.waited + 1)
        if self.waited > settings.patience:
            self.factor, self.waited = self.factor * settings.gamma, 0


def rate_factor(settings: Settings, step: int, total: int, each: float) -> float:
    """What the highest learning rate is multiplied by; `each` is steps per epoch."""
    total = settings.schedule_steps or total
    rising = settings.warmup_steps or settings.of_epochs(settings.warmup, each)
    rising = min(rising, total // 2)
    if step < rising:
        return (step + 1) / rising
    if settings.schedule in ("constant", "plateau"):
        return 1.0
    if settings.schedule == "milestones":
        return settings.gamma ** sum(step >= m * each for m in settings.milestones)
    done = min(1.0, (step - rising) / max(1, total - rising))
    return 1 - done if settings.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
