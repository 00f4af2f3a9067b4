"""Every rank sends entries of its own choice: the largest, or those above a threshold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from thinwire.bucket import by_layer, by_row
from thinwire.combinators import InBasis, Route
from thinwire.combinators import dense as _dense
from thinwire.frames.dct import Dct
from thinwire.layout import Layout, Slot, vectors
from thinwire.memory import Residual
from thinwire.protocols import Memory, Reducer
from thinwire.recipes.options import (
    Densities,
    Merge,
    by_node,
    densities,
    merge,
    remembered,
    schedulable,
    sent_whole,
    sparse,
)
from thinwire.reducers import Select
from thinwire.schedule import Density, Number, dgc_ramp, stages
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
    collective: Merge = None,
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
    value: float | None = None,
    capacity: float = 1.0,
    collective: Merge = None,
    memory: str | Memory = "residual",
    wire: str | Wire = "fp32",
    warmup: int = 0,
) -> Reducer:
    """Entries of at least a magnitude `value` (0.01); of too many, the largest.

    Too many are more than `capacity` times the density. A parameter so small that the density,
    rounded, is all of it goes whole. Source: Strom, Interspeech 2015.
    """
    if value is not None and all(number == 1.0 for number in _numbers(density)):
        raise ValueError(
            f"a density of 1.0 sends everything, whatever its value, got density={density!r} "
            f"with value={value!r}; give the most that may be sent, e.g. density=0.5"
        )
    pick = Threshold(
        estimate=Constant(0.01 if value is None else value), correct=None, capacity=capacity
    )
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
    collective: Merge = None,
    memory: str | Memory = "momentum",
    wire: str | Wire = "fp32",
    warmup: int = 0,
) -> Reducer:
    """Deep gradient compression: a threshold from a sample, momentum corrected before selection.

    `hierarchical` keeps the largest among what the threshold lets through, never more than the
    density. `ramp` is a list of densities, or a number of epochs for the paper's formula; each
    lasts `every` steps. Vectors go whole, as in the authors' code; density={"": 0.001} is of all.
    Source: Lin et al., ICLR 2018, arXiv 1712.01887.
    """
    wanted = _ramped(density, ramp, every)
    if not isinstance(wanted, Mapping):
        wanted = {vectors: 1.0, "": wanted}
    pick = Threshold(
        estimate=Sampled(fraction=sample),
        correct=(0.8, 2.0) if hierarchical else (0.7, 1.3),
        capacity=1.0 if hierarchical else 2.0,
    )
    return sparse(
        pick, by_layer, density=wanted, collective=collective, memory=memory, wire=wire,
        warmup=warmup,
    )  # fmt: skip


@schedulable
def gaussiank(
    density: Densities = 0.01,
    *,
    capacity: float = 2.0,
    collective: Merge = None,
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
    collective: Merge = None,
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
    collective: Merge = None,
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
    collective: Merge = None,
    memory: str | Memory = "residual",
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
    if memory != "residual" and decay != 0.999:
        raise ValueError(
            f"decay belongs to the residual, got decay={decay!r} with memory={memory!r}; give one"
        )
    basis, kept = Dct(chunk), Residual(decay=decay) if memory == "residual" else memory
    inner = Route(SentWhole(basis, select.density), _dense(), InBasis(basis, select))
    return remembered(kept, warmup, by_node(collective, inner))


@dataclass(frozen=True)
class SentWhole:
    """The parameters whose chunks would be sent whole: dense needs no indices for them."""

    basis: Dct
    density: Density

    def __call__(self, slot: Slot) -> bool:
        chunks = self.basis.layout(Layout((slot,), slot.offset + slot.numel))
        return sent_whole(chunks, by_row, self.density)


def _numbers(density: Densities) -> list[Number]:
    return list(density.values()) if isinstance(density, Mapping) else [density]


def _ramped(density: Densities, ramp: int | Sequence[float], every: int) -> Densities:
    if not ramp and not isinstance(ramp, float):
        if every:
            raise ValueError(f"every is how long a stage of the ramp lasts, got every={every!r} "
                             "without a ramp; give ramp too")  # fmt: skip
        return density
    if callable(density) or not isinstance(density, int | float):
        raise ValueError(f"a ramp ends at one density, got density={density!r}; give a number")
    if isinstance(ramp, int):
        return dgc_ramp(density, ramp, every)
    if not isinstance(ramp, tuple | list):
        raise ValueError(
            f"ramp must be a list of densities or a number of epochs, got {ramp!r}; e.g. "
            "ramp=[0.25, 0.0625, 0.0156, 0.004]"
        )
    return stages((*ramp, density), every)
