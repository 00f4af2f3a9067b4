"""One step past one machine: 2 to 65,536 ranks, each with its own speed and link.

    ready[r]  += (backward + selection of the bucket) * slowness of rank r
    start      = when every rank is ready and the network is free
    end        = start + messages * alpha + words * beta of the slowest link

Exchanges are the closed forms of `costs`; on nodes of several ranks a dense sum inside every node
comes before, of which each rank then has a part to exchange between nodes, and after.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from thinwire_lab.simulate.costs import COSTS, Cost, Problem

WORD = 4
# low-rank factors are all-reduced: past a few dozen ranks nobody does that round a ring
_HALVED = {"PowerSGD": lambda p: 4.0 * p.log, "ACP-SGD": lambda p: 2.0 * p.log}
METHODS = tuple(
    replace(cost, messages=_HALVED[cost.name]) if cost.name in _HALVED else cost for cost in COSTS
)


@dataclass(frozen=True, kw_only=True)
class Training:
    """A model: gradients per bucket, seconds of forward, backward, and selecting one gradient;
    `density` and `rank` for those that take one."""

    buckets: tuple[int, ...]
    forward: float
    backward: float
    select: float = 0.0  # seconds per gradient
    density: float = 0.01
    rank: int = 4

    def __post_init__(self) -> None:
        if not self.buckets or min(self.buckets) < 1:
            raise ValueError(
                f"buckets are numbers of gradients, 1 or more each, got {self.buckets}"
            )
        if not 0 < self.density <= 1:
            raise ValueError(f"density must be in (0, 1], got {self.density}")

    @property
    def numel(self) -> int:
        return sum(self.buckets)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Ranks and their links: (seconds per message, seconds per byte) between nodes and inside them.

    `jitter` is the spread of compute times (a half-normal excess), `slow` the share of ranks whose
    link is `slow_by` times slower.
    """

    world: int
    between: tuple[float, float]
    per_node: int = 1
    inside: tuple[float, float] = (5e-6, 1e-10)
    jitter: float = 0.0
    slow: tuple[float, float] = (0.0, 1.0)  # share of ranks, times slower

    def __post_init__(self) -> None:
        if self.world < 1 or self.per_node < 1 or self.world % self.per_node:
            raise ValueError(
                f"{self.world} ranks do not fill nodes of {self.per_node}; give a multiple of it"
            )
        if min(*self.between, *self.inside) < 0 or not self.between[1] > 0:
            raise ValueError(
                "links take seconds per message, from 0, and seconds per byte, above 0, got "
                f"{self.between} between nodes, {self.inside} inside"
            )


def simulate(method: Cost, training: Training, cluster: Cluster, seed: int = 0) -> float:
    """Seconds of one step."""
    draw = np.random.default_rng(seed)
    slowness = 1 + cluster.jitter * np.abs(draw.standard_normal(cluster.world))
    share, times = cluster.slow
    links = np.where(draw.random(cluster.world) < share, times, 1.0)
    ready = training.forward * slowness
    selects = 0.0 if method.name.startswith(("dense", "16-bit")) else training.select
    free = 0.0
    for numel in training.buckets:
        part = training.backward * numel / training.numel
        ready += (part + selects * numel) * slowness
        start = max(float(ready.max()), free)
        free = start + exchange(method, numel, training, cluster, float(links.max()))
    return max(free, float(ready.max()))


def exchange(
    method: Cost, numel: int, training: Training, cluster: Cluster, slowest: float = 1.0
) -> float:
    """Seconds of one bucket's exchange over the slowest link."""
    nodes, size = cluster.world // cluster.per_node, cluster.per_node
    alpha, beta = cluster.between
    own = max(1, numel // size)
    problem = Problem(
        d=own, k=max(1, round(training.density * own)), world=nodes, rank=training.rank
    )
    across = method.seconds(problem, alpha, WORD * beta * slowest) if nodes > 1 else 0.0
    if size == 1:
        return across
    alpha, beta = cluster.inside
    around = 2 * ((size - 1) * alpha + (size - 1) / size * numel * WORD * beta)
    return across + around


def table(training: Training, cluster: Cluster, worlds: Sequence[int]) -> dict[str, list[float]]:
    """The step of every method at every size."""
    clusters = [replace(cluster, world=world) for world in worlds]
    return {m.name: [simulate(m, training, one) for one in clusters] for m in METHODS}


def winners(
    training: Training, cluster: Cluster, worlds: Sequence[int], rates: Sequence[float]
) -> list[list[str]]:
    """Who is fastest, for every rate (bits per second between nodes; rows) and world (columns)."""
    rows = []
    for rate in rates:
        links = replace(cluster, between=(cluster.between[0], 8 / rate))
        found = table(training, links, worlds)
        rows.append([min(found, key=lambda name: found[name][i]) for i in range(len(worlds))])
    return rows
