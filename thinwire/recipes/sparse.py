"""Every rank sends entries of its own choice: the largest, or those above a threshold."""

from __future__ import annotations

from collections.abc import Sequence

from thinwire.bucket import by_layer, by_row
from thinwire.combinators import InBasis
from thinwire.frames.dct import Dct
from thinwire.memory import Residual
from thinwire.protocols import Collective, Memory, Reducer
from thinwire.recipes.options import Densities, densities, merge, remembered, schedulable, sparse
from thinwire.reducers import Select
from thinwire.schedule import dgc_ramp, stages
from thinwire.selectors.estimators import Bisect, Constant, Sampled, gaussian, trimmed
from thinwire.selectors.sidco import Sidco
from thinwire.selectors.threshold import Threshold, exact
from thinwire.selectors.topk import topk as _topk
from thinwire.wire import Wire
from thinwire.wire import wire as as_wire


@schedulable
def topk(
    density: Densities = 0.01,
    *,
    refresh: int = 1,
    collective: Collective | None = None,
    memory: str | Memory = "residual",
    wire: str | Wire = "fp32",
    warmup: int = 0,
) -> Reducer:
    """The largest entries of every layer, all-gathered (TopkA).

    With `refresh` the exact threshold is taken every so many steps and nudged in between
    (TopkA-opt). Source: Aji & Heafield, EMNLP 2017, arXiv 1704.05021.
    """
    reuse = Threshold(estimate=exact, refresh=refresh, nudge=1.012) if refresh != 1 else None
    return sparse(
        reuse or _topk, by_layer, density=density, collective=collective, memory=memory,
        wire=wire, warmup=warmup, ragged=reuse is not None,
    )  # fmt: skip


@schedulable
def threshold(
    density: Densities = 0.01,
    *,
    value: float = 0.01,
    capacity: float = 1.0,
    collective: Collective | None = None,
    memory: str | Memory = "residual",
    wire: str | Wire = "fp32",
    warmup: int = 0,
) -> Reducer:
    """Entries of at least this magnitude; of more than `capacity` times the density, the largest.

    Source: Strom, Interspeech 2015.
    """
    pick = Threshold(estimate=Constant(value), correct=None, capacity=capacity)
    return sparse(
        pick, by_layer, density=density, collective=collective, memory=memory, wire=wire,
        warmup=warmup,
    )  # fmt: skip


@schedulable
def dgc(
    density: Densities = 0.001,
    *,
    sample: float = 0.01,
    hierarchical: bool = True,
    ramp: int | Sequence[float] = (),
    every: int = 0,
    collective: Collective | None = None,
    memory: str | Memory = "momentum",
    wire: str | Wire = "fp32",
    warmup: int = 0,
) -> Reducer:
    """Deep gradient compression: a threshold from a sample, momentum corrected before selection.

    `hierarchical` keeps the largest among what the threshold lets through, never more than the
    density. `ramp` is a list of densities, or a number of epochs for the paper's formula; each
    lasts `every` steps. Source: Lin et al., ICLR 2018, arXiv 1712.01887.
    """
    pick = Threshold(
        estimate=Sampled(fraction=sample),
        correct=(0.8, 2.0) if hierarchical else (0.7, 1.3),
        capacity=1.0 if hierarchical else 2.0,
    )
    return sparse(
        pick, by_layer, density=_ramped(density, ramp, every), collective=collective,
        memory=memory, wire=wire, warmup=warmup,
    )  # fmt: skip


@schedulable
def gaussiank(
    density: Densities = 0.01,
    *,
    capacity: float = 2.0,
    collective: Collective | None = None,
    memory: str | Memory = "residual",
    wire: str | Wire = "fp32",
    warmup: int = 0,
) -> Reducer:
    """A threshold from the normal distribution's quantile, corrected to 2/3 to 4/3 of the density.

    Source: Shi et al. 2019, arXiv 1911.08772.
    """
    pick = Threshold(estimate=gaussian, correct=(2 / 3, 4 / 3), capacity=capacity)
    return sparse(
        pick, by_layer, density=density, collective=collective, memory=memory, wire=wire,
        warmup=warmup,
    )  # fmt: skip


@schedulable
def redsync(
    density: Densities = 0.01,
    *,
    trim: bool = False,
    refresh: int = 1,
    collective: Collective | None = None,
    memory: str | Memory = "residual",
    wire: str | Wire = "fp32",
    warmup: int = 0,
) -> Reducer:
    """A threshold between mean and maximum, found by bisection; with `trim` the largest above it.

    Source: Fang et al., JPDC 2019, arXiv 1808.04357.
    """
    pick = Threshold(
        estimate=trimmed if trim else Bisect(),
        refresh=refresh,
        correct=None if trim else (0.5, 2.0),
        capacity=1.0 if trim else 2.0,
    )
    return sparse(
        pick, by_layer, density=density, collective=collective, memory=memory, wire=wire,
        warmup=warmup,
    )  # fmt: skip


@schedulable
def sidco(
    density: Densities = 0.01,
    *,
    fit: str = "pareto",
    stages: int | None = None,
    collective: Collective | None = None,
    memory: str | Memory = "residual",
    wire: str | Wire = "fp32",
    warmup: int = 0,
) -> Reducer:
    """A threshold from a fitted exponential, gamma or Pareto distribution, in stages.

    The number of stages follows what they achieve, unless it is given.
    Source: Abdelmoniem et al., MLSys 2021, arXiv 2101.10761.
    """
    estimate = Sidco(fit=fit, stages=2 if stages is None else stages, adapt=stages is None)
    return sparse(
        Threshold(estimate=estimate), by_layer, density=density, collective=collective,
        memory=memory, wire=wire, warmup=warmup,
    )  # fmt: skip


@schedulable
def demo_dct(
    density: Densities = 32 / 4096,
    *,
    chunk: int = 64,
    decay: float = 0.999,
    collective: Collective | None = None,
    memory: str | Memory | None = None,
    wire: str | Wire = "fp32",
    warmup: int = 0,
) -> Reducer:
    """Decoupled momentum: the largest DCT coefficients of every chunk of the decaying momentum.

    The momentum is the memory; let the optimizer have none, and take the sign of the mean as the
    paper does. Source: Peng, Quesnelle & Kingma 2024, arXiv 2411.19870.
    """
    select = Select(
        pick=_topk,
        over=by_row,
        density=densities(density),
        collective=merge(collective, ragged=False),
        wire=as_wire(wire),
    )
    kept = Residual(decay=decay) if memory is None else memory
    return remembered(kept, warmup, InBasis(Dct(chunk), select))


def _ramped(density: Densities, ramp: int | Sequence[float], every: int) -> Densities:
    if ramp == 0 or ramp == ():
        return density
    if callable(density) or not isinstance(density, int | float):
        raise ValueError(f"a ramp ends at one density, got density={density!r}; give a number")
    if isinstance(ramp, int):
        return dgc_ramp(density, ramp, every)
    return stages((*ramp, density), every)
