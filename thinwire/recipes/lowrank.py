"""Few values, the same ones on all ranks: random coordinates, and low rank."""

from __future__ import annotations

from typing import Unpack

from thinwire.frames.lowrank import LowRank
from thinwire.frames.shared import SharedCoordinates
from thinwire.protocols import Frame, Reducer
from thinwire.recipes.frame import frame, route_dense
from thinwire.recipes.options import Densities, Wired, read_density
from thinwire.recipes.recipe import recipe
from thinwire.reducers import Project
from thinwire.schedule import Number, Whole, read_number
from thinwire.wire import wire as as_wire


@recipe()
def randomk(density: Densities = 0.01, *, seed: int = 0, **shared: Unpack[Wired]) -> Reducer:
    """Random coordinates, the same on all ranks: no indices.

    Args:
        density: Share of the values that are sent.
        seed: Seed of the draws.
        **shared: See `thinwire.recipes.options.Wired`.

    Example:
        randomk(density=Ramp(start=0.25, end=0.01, steps=500))

    Source: Stich et al., NeurIPS 2018, arXiv 1809.07599.
    """
    return _projected(SharedCoordinates(density=read_density(density), seed=seed), shared)


@recipe()
def powersgd(
    rank: Whole = 4, *, min_saving: Number = 1.0, seed: int = 0, **shared: Unpack[Wired]
) -> Reducer:
    """Low rank: both factors averaged in every step.

    Args:
        rank: Columns of a factor.
        min_saving: A matrix goes whole unless its factors are so many times smaller.
        seed: Seed of the first factors.
        **shared: See `thinwire.recipes.options.Wired`.

    Example:
        powersgd(rank=8, wire="bf16")

    Source: Vogels et al., NeurIPS 2019, arXiv 1905.13727.
    """
    low = LowRank(rank=rank, rounds=2, min_saving=read_number(min_saving), seed=seed)
    return _projected(low, shared)


@recipe()
def acpsgd(
    rank: Whole = 4, *, min_saving: Number = 1.0, seed: int = 0, **shared: Unpack[Wired]
) -> Reducer:
    """Low rank: the two factors averaged in turn.

    One all-reduce per bucket, where `powersgd` has two.

    Args:
        rank: Columns of a factor.
        min_saving: A matrix goes whole unless its factors are so many times smaller.
        seed: Seed of the first factors.
        **shared: See `thinwire.recipes.options.Wired`.

    Example:
        acpsgd(rank=8, memory="momentum")

    Source: Zhang et al., ICDCS 2023, arXiv 2306.08881.
    """
    low = LowRank(rank=rank, rounds=1, min_saving=read_number(min_saving), seed=seed)
    return _projected(low, shared)


def _projected(basis: Frame, shared: Wired) -> Reducer:
    inner = Project(frame=basis, wire=as_wire(shared["wire"]))
    return frame(route_dense(inner, shared), shared)
