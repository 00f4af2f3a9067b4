"""The one training loop: DDP, a recipe attached (or none), and what came of it."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.engine.ddp import attach
from thinwire.jobs.digits import Split
from thinwire.protocols import Reducer


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How to train; `batch` is a worker's."""

    steps: int
    batch: int
    rate: float
    seed: int = 0
    warmup: float = 0.05  # of the steps, while the learning rate rises


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one training gave, as rank 0 saw it."""

    accuracy: float
    loss: float
    step_seconds: float  # median
    metrics: dict[str, Any]


def train(
    rank: int,
    world: int,
    net: nn.Module,
    splits: tuple[Split, Split],
    recipe: Reducer,
    settings: Settings,
    report: Callable[[int], None],
) -> Outcome:
    """Train a fresh copy of `net`, and test it."""
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=settings.rate)
    sync = attach(model, recipe, optimizer=optimizer)
    loss_of = nn.CrossEntropyLoss()
    seconds, losses = [], []
    for step, (images, labels) in enumerate(batches(splits[0], rank, world, settings)):
        begin = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = settings.rate * _shape(step, settings)
        loss = loss_of(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - begin)
        losses.append(loss.item())
        if rank == 0 and (step + 1) % 10 == 0:
            report(step + 1)
    accuracy = _accuracy(net, splits[1])
    metrics = sync.metrics()
    sync.detach()
    return Outcome(
        accuracy=accuracy,
        loss=statistics.mean(losses[-20:]),
        step_seconds=statistics.median(seconds),
        metrics=metrics,
    )


def batches(
    split: Split, rank: int, world: int, settings: Settings
) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's share of every epoch's shuffle, as many batches as there are steps."""
    draw = torch.Generator().manual_seed(settings.seed)
    together = settings.batch * world
    done = 0
    while True:
        order = torch.randperm(len(split.labels), generator=draw)
        for start in range(0, len(order) - together + 1, together):
            if done == settings.steps:
                return
            first = start + rank * settings.batch
            chosen = order[first : first + settings.batch]
            yield split.images[chosen], split.labels[chosen]
            done += 1


def _shape(step: int, settings: Settings) -> float:
    """Linear warm-up, then a cosine to zero."""
    rising = max(1, int(settings.warmup * settings.steps))
    if step < rising:
        return (step + 1) / rising
    return 0.5 * (1 + math.cos(math.pi * (step - rising) / max(1, settings.steps - rising)))


def _accuracy(net: nn.Module, split: Split) -> float:
    with torch.no_grad():
        return float((net(split.images).argmax(dim=1) == split.labels).float().mean())
