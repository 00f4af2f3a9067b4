"""Every message of a recipe, in real processes: what the network sees, step by step.

A small model learns a fixed teacher; its gradients are one bucket, reduced without overlap, so that
phases do not mix. Before it starts, messages between ranks 0 and 1 tell the network's latency and
time a byte.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thinwire import recipes
from thinwire.bucket import Bucket
from thinwire.comm.metered import Event, Metered
from thinwire.comm.torch import TorchComm
from thinwire.layout import Layout
from thinwire.protocols import Comm, Traffic
from thinwire_lab.local import workers


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is traced, and where."""

    call: str
    world: int
    params: int = 1_000_000
    steps: int = 20
    net: str = "none"


@dataclass(frozen=True, kw_only=True)
class Trace:
    """All events of all ranks, what was priced for each step, and the network as it was found."""

    setting: Setting
    params: int  # that the model really has
    events: tuple[tuple[Event, ...], ...]  # by rank
    priced: tuple[Traffic, ...]  # by step
    alpha: float  # seconds a message
    beta: float  # seconds a byte

    def seconds(self, step: int) -> float:
        """What the alpha-beta model says of a step."""
        return self.priced[step].rounds * self.alpha + self.priced[step].bytes * self.beta


def record(setting: Setting, on_report: Callable[[int], None] = lambda message: None) -> Trace:
    recipes.parse(setting.call)  # a bad call is the caller's error, before any process is started
    results = workers.run(setting.world, _worker, setting, on_report=on_report, net=setting.net)
    events, priced, params, alpha, beta = zip(*results, strict=True)
    return Trace(
        setting=setting, params=params[0], events=events, priced=priced[0], alpha=alpha[0],
        beta=beta[0],
    )  # fmt: skip


def model(params: int) -> nn.Module:
    """Four square layers, about that many parameters."""
    side = max(4, round((params / 4) ** 0.5))
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(side, side), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _worker(rank: int, world: int, report: Any, setting: Setting) -> tuple[Any, ...]:
    group = dist.group.WORLD
    assert group is not None
    comm = TorchComm(group)
    alpha, beta = ping(comm)
    recipe = recipes.parse(setting.call)
    torch.manual_seed(0)
    net, teacher = model(setting.params), model(setting.params)
    meter = Metered(comm, trace=True)
    state: dict[str, Any] = {}
    draw = torch.Generator().manual_seed(1 + rank)
    names = [name for name, _ in net.named_parameters()]
    for step in range(setting.steps):
        grads = dict(zip(names, _gradients(net, teacher, draw), strict=True))
        meter.step = step
        meter.start()
        bucket = Bucket.of(grads, state=state, step=step)
        mean = recipe.reduce(bucket, meter).mean
        _descend(net, mean, bucket.layout)
        if rank == 0:
            report(step + 1)
    layout = bucket.layout
    priced = tuple(recipe.traffic(layout, world, step) for step in range(setting.steps))
    return tuple(meter.events or ()), priced, layout.size, alpha, beta


def ping(comm: Comm, size: int = 1_000_000, times: int = 9) -> tuple[float, float]:
    """Seconds a message, and seconds a byte, between ranks 0 and 1; known to all."""
    found = torch.zeros(2, dtype=torch.float64)
    if comm.size > 1:
        short, long = (_swaps(comm, n, times) for n in (1, size))
        found += torch.tensor([short, max(0.0, long - short) / size])
    alpha, beta = comm.broadcast(found, 0).tolist()
    return float(alpha), float(beta)


def _swaps(comm: Comm, size: int, times: int) -> float:
    """The median time in which both have each other's bytes."""
    taken = []
    data = torch.zeros(size, dtype=torch.uint8)
    for _ in range(times):
        comm.barrier()
        begin = time.perf_counter()
        if comm.rank < 2:
            comm.exchange(data, 1 - comm.rank, 1 - comm.rank, size)
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken)


def _gradients(net: nn.Module, teacher: nn.Module, draw: torch.Generator) -> list[Tensor]:
    x = torch.randn(32, next(net.parameters()).shape[1], generator=draw)
    with torch.no_grad():
        goal = teacher(x)
    loss = (net(x) - goal).square().mean()
    return list(torch.autograd.grad(loss, list(net.parameters())))


def _descend(net: nn.Module, mean: Tensor, layout: Layout) -> None:
    with torch.no_grad():
        for parameter, slot in zip(net.parameters(), layout.slots, strict=True):
            parameter.sub_(slot.view(mean), alpha=0.5)
