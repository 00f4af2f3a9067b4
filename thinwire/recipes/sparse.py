"""Every rank sends entries of its own choice: the largest, or those above a threshold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Unpack

from thinwire.bucket import by_layer, by_row
from thinwire.combinators import InBasis, Route
from thinwire.combinators import dense as _dense
from thinwire.frames.dct import Dct
from thinwire.layout import Layout, Slot, vectors
from thinwire.memory import Residual
from thinwire.protocols import Reducer
from thinwire.recipes.frame import choose, frame_sparse, sends_all, sparse
from thinwire.recipes.options import Densities, Sparse, read_estimate
from thinwire.recipes.recipe import recipe
from thinwire.schedule import Density, Number, Whole, dgc_ramp, read_number
from thinwire.schedule import stages as _stages
from thinwire.selectors.estimators import Bisect, Constant, Sampled, gaussian, trimmed
from thinwire.selectors.sidco import Sidco
from thinwire.selectors.threshold import Threshold, exact
from thinwire.selectors.topk import topk as _topk


@recipe()
def topk(density: Densities = 0.01, *, refresh: Whole = 1, **shared: Unpack[Sparse]) -> Reducer:
    """The largest entries of every layer, all-gathered.

    This is TopkA, and with `refresh` TopkA-opt.

    Args:
        density: Share of the entries of a layer that are sent.
        refresh: Steps from one exact threshold to the next; in between it is nudged.
        **shared: See `thinwire.recipes.options.Sparse`.

    Example:
        topk(density=Ramp(start=0.25, end=0.01, steps=500), wire="int8+auto")

    Source: Aji & Heafield, EMNLP 2017, arXiv 1704.05021.
    """
    if refresh == 1:
        return sparse(_topk, by_layer, density, shared, ragged=False)
    reused = Threshold(estimate=exact, refresh=read_number(refresh), nudge=1.012)
    return sparse(reused, by_layer, density, shared)


@recipe()
def threshold(
    density: Densities = 0.01,
    *,
    value: Number | None = None,
    capacity: Number = 1.0,
    **shared: Unpack[Sparse],
) -> Reducer:
    """Entries of at least a fixed magnitude.

    A parameter so small that the density, rounded, is all of it goes whole.

    Args:
        density: Share of the entries of a layer that may be sent; of more, the largest are.
        value: The magnitude; None is 0.01.
        capacity: How many times the density may be sent.
        **shared: See `thinwire.recipes.options.Sparse`.

    Example:
        threshold(density=0.02, value=0.001)

    Source: Strom, Interspeech 2015.
    """
    if value is not None and all(number == 1.0 for number in _numbers(density)):
        raise ValueError(
            f"a density of 1.0 sends everything, whatever its value, got density={density!r} "
            f"with value={value!r}; give the most that may be sent, e.g. density=0.5"
        )
    least = Constant(0.01 if value is None else read_number(value))
    pick = Threshold(estimate=least, correct=None, capacity=read_number(capacity))
    return sparse(pick, by_layer, density, shared)


@recipe(memory="momentum")
def dgc(
    density: Densities = 0.001,
    *,
    sample: Number = 0.01,
    hierarchical: bool = True,
    ramp: int | Sequence[float] = (),
    every: int = 0,
    **shared: Unpack[Sparse],
) -> Reducer:
    """Deep gradient compression: top-k by a sampled threshold.

    Momentum is corrected before selection. Vectors go whole, as in the authors' code;
    density={"": 0.001} is for all parameters.

    Args:
        density: Share of the entries of a layer that are sent.
        sample: Share of the entries that the threshold is estimated from.
        hierarchical: Of what the threshold lets through, keep the largest, never more than density.
        ramp: Densities before that one, or a number of epochs for the paper's formula.
        every: Steps that each of them lasts.
        **shared: See `thinwire.recipes.options.Sparse`.

    Example:
        dgc(density=0.001, ramp=[0.25, 0.0625, 0.0156, 0.004], every=100)

    Source: Lin et al., ICLR 2018, arXiv 1712.01887.
    """
    wanted = _ramped(density, ramp, every)
    if not isinstance(wanted, Mapping):
        wanted = {vectors: 1.0, "": wanted}
    pick = Threshold(
        estimate=Sampled(fraction=read_number(sample)),
        correct=(0.8, 2.0) if hierarchical else (0.7, 1.3),
        capacity=1.0 if hierarchical else 2.0,
    )
    return sparse(pick, by_layer, wanted, shared)


@recipe()
def gaussiank(
    density: Densities = 0.01, *, capacity: Number = 2.0, **shared: Unpack[Sparse]
) -> Reducer:
    """Top-k by a threshold from the normal distribution.

    The quantile is corrected until it lets through 2/3 to 4/3 of the density.

    Args:
        density: Share of the entries of a layer that are sent.
        capacity: How many times the density may be sent.
        **shared: See `thinwire.recipes.options.Sparse`.

    Example:
        gaussiank(density=0.01, capacity=1.5)

    Source: Shi et al. 2019, arXiv 1911.08772.
    """
    pick = Threshold(estimate=gaussian, correct=(2 / 3, 4 / 3), capacity=read_number(capacity))
    return sparse(pick, by_layer, density, shared)


@recipe()
def redsync(
    density: Densities = 0.01, *, trim: bool = False, refresh: Whole = 1, **shared: Unpack[Sparse]
) -> Reducer:
    """Top-k by a threshold found by bisection.

    It is searched between mean and maximum.

    Args:
        density: Share of the entries of a layer that are sent.
        trim: Raise a lower bound instead, and send the largest above it.
        refresh: Steps from one threshold to the next.
        **shared: See `thinwire.recipes.options.Sparse`.

    Example:
        redsync(density=0.01, trim=True)

    Source: Fang et al., JPDC 2019, arXiv 1808.04357.
    """
    pick = Threshold(
        estimate=trimmed if trim else Bisect(),
        refresh=read_number(refresh),
        correct=None if trim else (0.5, 2.0),
        capacity=1.0 if trim else 2.0,
    )
    return sparse(pick, by_layer, density, shared)


@recipe()
def sidco(
    density: Densities = 0.01,
    *,
    fit: str = "pareto",
    stages: Whole | None = None,
    **shared: Unpack[Sparse],
) -> Reducer:
    """Top-k by a threshold from a fitted distribution.

    Args:
        density: Share of the entries of a layer that are sent.
        fit: "exponential", "gamma" or "pareto".
        stages: Fits, each to what the last one let through. None follows what they achieve.
        **shared: See `thinwire.recipes.options.Sparse`.

    Example:
        sidco(density=0.01, fit="exponential", stages=1)

    Source: Abdelmoniem et al., MLSys 2021, arXiv 2101.10761.
    """
    number = read_number(stages)
    estimate = Sidco(fit=fit, stages=2 if number is None else number, adapt=number is None)
    return sparse(Threshold(estimate=estimate), by_layer, density, shared)


@recipe()
def demo_dct(
    density: Densities = 32 / 4096,
    *,
    chunk: Whole = 64,
    decay: Number = 0.999,
    **shared: Unpack[Sparse],
) -> Reducer:
    """The largest DCT coefficients of decaying momentum.

    This is decoupled momentum: the residual is the momentum. Let the optimizer have none, and take
    the sign of the mean as the paper does.

    Args:
        density: Share of the coefficients of a chunk that are sent.
        chunk: Largest side of a chunk of a matrix.
        decay: What the residual is multiplied by in every step.
        **shared: See `thinwire.recipes.options.Sparse`.

    Example:
        demo_dct(density=0.02, chunk=32)

    Source: Peng, Quesnelle & Kingma 2024, arXiv 2411.19870.
    """
    pick = read_estimate(shared["estimate"], _topk, by_row)
    select = choose(pick, by_row, density, shared, ragged=False)
    if shared["memory"] == "residual":
        shared["memory"] = Residual(decay=decay)
    elif decay != 0.999:
        raise ValueError(
            f"decay belongs to the residual, got decay={decay!r} with "
            f"memory={shared['memory']!r}; give one"
        )
    basis = Dct(read_number(chunk))
    inner = Route(SentWhole(basis, select.density), _dense(), InBasis(basis, select))
    return frame_sparse(inner, density, shared)


@dataclass(frozen=True)
class SentWhole:
    """The parameters whose chunks would be sent whole: dense needs no indices for them."""

    basis: Dct
    density: Density

    def __call__(self, slot: Slot) -> bool:
        chunks = self.basis.layout(Layout((slot,), slot.stop))
        return sends_all(chunks, by_row, self.density)


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
    return _stages((*ramp, density), every)
