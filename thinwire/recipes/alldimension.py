"""ADTopk: all-dimension top-k, and in turn with it flat top-k."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Unpack

from thinwire.bucket import View, by_dim0, by_dim1, by_layer, by_longer, by_row
from thinwire.combinators import Alternate, Rule
from thinwire.layout import Layout, Slot, vectors
from thinwire.protocols import Reducer
from thinwire.recipes import options
from thinwire.recipes.frame import choose, frame_sparse, sends_all
from thinwire.recipes.options import Densities, Parameters, Sparse
from thinwire.recipes.recipe import recipe
from thinwire.schedule import Density, Number, checked_whole, read_number
from thinwire.selectors.topk import topk

ROWS: dict[str, View] = {"matrix": by_row, "dim1": by_dim1, "longer": by_longer, "dim0": by_dim0}


@dataclass(frozen=True)
class StaysDense:
    """The caller's rule, and whatever would be sent whole anyway: dense needs no indices for it."""

    rule: Rule
    over: View
    density: Density

    def __call__(self, slot: Slot) -> bool:
        return self.rule(slot) or sends_all(Layout((slot,), slot.stop), self.over, self.density)


@dataclass(frozen=True)
class VectorsAnd:
    """What is dense by ADTopk's own rule, and what the caller names."""

    more: Rule

    def __call__(self, slot: Slot) -> bool:
        return vectors(slot) or self.more(slot)


@recipe(dense=vectors)
def adtopk(
    density: Densities = 0.01,
    *,
    rows: str | View = "matrix",
    interleave: bool | tuple[int, int] = False,
    steps: int | None = None,
    fraction: Number = 0.75,
    **shared: Unpack[Sparse],
) -> Reducer:
    """All-dimension top-k: the largest entries of every row.

    The paper's other ideas are options of every sparse recipe. Partial sparsification is
    partial=True. Hybrid communication is collective="cheapest". Threshold estimation is
    interleave=True, estimate=True: it serves the flat turns. Patterns in `dense` are for parameters
    besides the vectors, and None compresses all.

    Args:
        density: Share of the entries of a parameter that are sent, at least one per row.
        rows: What a row is: "matrix" (output channel by the rest), "dim1" (as published code does),
            "longer" or "dim0".
        interleave: Take turns with flat top-k; (2, 1) is two steps to one.
        steps: Length of the training, if the turns are to end.
        fraction: Share of the training after which they do.
        **shared: See `thinwire.recipes.options.Sparse`.

    Example:
        adtopk(density=0.01, rows="dim1", dense=["^0[.]"], no_feedback=["^14[.]"])

    Source: ADTopk, HPDC 2024, doi 10.1145/3625549.3658678.
    """
    over = ROWS.get(rows) if isinstance(rows, str) else rows
    if over is None or not callable(over):
        raise ValueError(f"rows must be one of {', '.join(ROWS)} (or a view), got {rows!r}")
    flat_pick = options.read_estimate(shared["estimate"], topk, by_layer)
    ragged = shared["collective"] is None or flat_pick is not topk
    inner: Reducer = choose(topk, over, density, shared, ragged=ragged)
    period = _period(interleave)
    if period is not None:
        flat = choose(flat_pick, by_layer, density, shared, ragged=ragged)
        inner = Alternate(inner, flat, period, _until(steps, read_number(fraction)))
    elif flat_pick is not topk or steps is not None:
        raise ValueError(
            "estimate and steps are for the flat turns of interleaving, got "
            f"estimate={shared['estimate']!r}, steps={steps!r} without it; set interleave=True"
        )
    if steps is None and fraction != 0.75:
        raise ValueError(f"fraction is of the training, got {fraction!r} alone; give steps too")
    return frame_sparse(inner, density, shared, _stays(shared["dense"], over, density))


def _stays(given: Parameters | None, over: View, density: Densities) -> Rule | None:
    """What is dense by the caller's rule, or by ADTopk's and the caller's patterns."""
    if given is None:
        return None
    rule = given if callable(given) else VectorsAnd(options.read_rule("dense", given))
    return StaysDense(rule, over, options.read_density(density))


def _period(interleave: bool | tuple[int, int]) -> tuple[int, int] | None:
    if isinstance(interleave, bool):
        return (1, 1) if interleave else None
    if not isinstance(interleave, tuple | list):
        raise ValueError(
            f"interleave must be True, False or a period, got {interleave!r}; (1, 1) changes every "
            "step"
        )
    return tuple(interleave)  # type: ignore[return-value]  # Alternate checks it


def _until(steps: int | None, fraction: float) -> int | None:
    if not 0 <= fraction <= 1:
        raise ValueError(f"fraction must be in [0, 1] of the training, got {fraction!r}")
    if steps is None:
        return None
    return round(fraction * checked_whole("steps", steps, 1, "the length of the training"))
