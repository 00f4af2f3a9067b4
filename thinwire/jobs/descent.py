"""Optimizers and learning rates, as the papers have them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from thinwire.combinators import memories
from thinwire.describe import rebuilt
from thinwire.jobs.job import Settings
from thinwire.memory import MomentumCorrected
from thinwire.protocols import Reducer


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
    if sgd:
        return torch.optim.SGD(groups, lr=rate, momentum=momentum)
    kind = torch.optim.Adam if settings.optimizer == "adam" else torch.optim.AdamW
    return kind(groups, lr=rate, betas=(momentum, 0.999), eps=settings.epsilon)


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
    usual = MomentumCorrected()

    def change(part: Any) -> Any:
        if not isinstance(part, MomentumCorrected):
            return part
        momentum = settings.momentum if part.momentum == usual.momentum else part.momentum
        clip = settings.clip * world or None if part.clip is None else part.clip
        return replace(part, momentum=momentum, clip=clip)

    changed: Reducer = rebuilt(recipe, change)
    return changed


def factor(settings: Settings, step: int, total: int, each: int) -> float:
    """What the highest learning rate is multiplied by; `each` is steps an epoch."""
    rising = settings.warmup_steps or settings.of_epochs(settings.warmup, each)
    rising = min(rising, total // 2)
    if step < rising:
        return (step + 1) / rising
    if settings.schedule == "constant":
        return 1.0
    if settings.schedule == "milestones":
        return settings.gamma ** sum(step >= m * each for m in settings.milestones)
    done = (step - rising) / max(1, total - rising)
    return 1 - done if settings.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
