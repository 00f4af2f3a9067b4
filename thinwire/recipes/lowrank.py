"""Few numbers for all ranks alike: random coordinates, and low rank."""

from __future__ import annotations

from collections.abc import Callable

from thinwire.frames.lowrank import LowRank
from thinwire.frames.shared import SharedCoordinates
from thinwire.protocols import Memory, Reducer
from thinwire.recipes.options import Densities, densities, remembered, schedulable
from thinwire.reducers import Project
from thinwire.wire import Wire
from thinwire.wire import wire as as_wire


def randomk(
    density: Densities = 0.01,
    *,
    memory: str | Memory = "residual",
    wire: str | Wire = "fp32",
    warmup: int = 0,
    seed: int = 0,
) -> Reducer:
    """Random coordinates that all ranks draw alike: no index travels.

    Source: Stich et al., NeurIPS 2018, arXiv 1809.07599.
    """
    frame = SharedCoordinates(density=densities(density), seed=seed)
    return remembered(memory, warmup, Project(frame=frame, wire=as_wire(wire)))


@schedulable
def powersgd(
    rank: int | Callable[[int], float] = 4,
    *,
    min_saving: float = 1.0,
    memory: str | Memory = "residual",
    wire: str | Wire = "fp32",
    warmup: int = 0,
    seed: int = 0,
) -> Reducer:
    """Low rank, both factors averaged every step.

    Source: Vogels et al., NeurIPS 2019, arXiv 1905.13727.
    """
    frame = LowRank(rank=rank, rounds=2, min_saving=min_saving, seed=seed)
    return remembered(memory, warmup, Project(frame=frame, wire=as_wire(wire)))


@schedulable
def acpsgd(
    rank: int | Callable[[int], float] = 4,
    *,
    min_saving: float = 1.0,
    memory: str | Memory = "residual",
    wire: str | Wire = "fp32",
    warmup: int = 0,
    seed: int = 0,
) -> Reducer:
    """Low rank, the factors averaged in turn: one all-reduce a bucket.

    Source: Zhang et al., ICDCS 2023, arXiv 2306.08881.
    """
    frame = LowRank(rank=rank, rounds=1, min_saving=min_saving, seed=seed)
    return remembered(memory, warmup, Project(frame=frame, wire=as_wire(wire)))
