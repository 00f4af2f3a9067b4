"""ADTopk whole: all-dimension top-k, interleaved with flat top-k, with estimated thresholds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from thinwire.bucket import View, by_dim0, by_dim1, by_layer, by_longer, by_row
from thinwire.combinators import Alternate, Route, Rule
from thinwire.combinators import dense as _dense
from thinwire.layout import Layout, Slot, vectors
from thinwire.partial import Partial
from thinwire.planned import Planned
from thinwire.protocols import Memory, Reducer, Selector
from thinwire.recipes.options import (
    Densities,
    Merge,
    by_node,
    check_zero,
    densities,
    merge,
    remembered,
    rule,
    schedulable,
    sent_whole,
)
from thinwire.reducers import Select
from thinwire.schedule import Density
from thinwire.selectors.drift import Drifting
from thinwire.selectors.topk import topk
from thinwire.wire import Wire
from thinwire.wire import wire as as_wire

ROWS: dict[str, View] = {"matrix": by_row, "dim1": by_dim1, "longer": by_longer, "dim0": by_dim0}


def nothing(slot: Slot) -> bool:
    """The rule that holds for no parameter."""
    return False


@dataclass(frozen=True)
class StaysDense:
    """The caller's rule, and whatever would be sent whole anyway: dense needs no indices for it."""

    rule: Rule
    over: View
    density: Density

    def __call__(self, slot: Slot) -> bool:
        alone = Layout((slot,), slot.offset + slot.numel)
        return self.rule(slot) or sent_whole(alone, self.over, self.density)


@dataclass(frozen=True)
class VectorsAnd:
    """What is dense by ADTopk's own rule, and what the caller names."""

    more: Rule

    def __call__(self, slot: Slot) -> bool:
        return vectors(slot) or self.more(slot)


@schedulable
def adtopk(
    density: Densities = 0.01,
    *,
    interleave: bool | tuple[int, int] | None = None,
    estimate: bool | int = False,
    rows: str | View = "matrix",
    steps: int | None = None,
    fraction: float = 0.75,
    dense: Rule | Sequence[str] | None = vectors,
    no_feedback: Rule | Sequence[str] = (),
    partial: bool = False,
    hybrid: bool = False,
    collective: Merge = None,
    memory: str | Memory = "residual",
    wire: str | Wire = "fp32",
    warmup: int = 0,
) -> Reducer:
    """All-dimension top-k: some entries of every row.

    `rows` says what a row is: "matrix" (output channel x rest), "dim1" (as published code does),
    "longer", "dim0". `interleave` alternates with flat top-k, (2, 1) two steps to one; with
    `steps`, the length of the training, only up to that `fraction` of it. `estimate` (a first
    interval, or True for 5) remembers the flat threshold, but costs more time than it saves
    (docs/algorithms.md). Parameters for which `dense` holds (a rule, or patterns besides the
    vectors) are averaged whole, None compresses all; `no_feedback` ones keep no residual. `partial`
    times sparse and dense for some steps, and then leaves dense what does not pay, out of the
    others' budget; `hybrid` sends every parameter by all-reduce or by all-gather, whichever is
    fewer bytes. Source: ADTopk, HPDC 2024, doi 10.1145/3625549.3658678.
    """
    over = ROWS.get(rows) if isinstance(rows, str) else rows
    if over is None or not callable(over):
        raise ValueError(f"rows must be one of {', '.join(ROWS)} (or a view), got {rows!r}")
    if hybrid and collective is not None:
        raise ValueError(f"hybrid chooses the collective, got collective={collective!r} too")
    collective = "cheapest" if hybrid else collective
    varies = collective is None or bool(estimate)
    merged, coded = merge(collective, ragged=varies), as_wire(wire)
    check_zero(merged, coded)

    def select(pick: Selector, view: View) -> Select:
        kept = densities(density)
        return Select(pick=pick, over=view, density=kept, collective=merged, wire=coded)

    inner: Reducer = select(topk, over)
    period = _period(interleave, estimate)
    if period is not None:
        flat = select(_flat_pick(estimate), by_layer)
        inner = Alternate(inner, flat, period, _until(steps, fraction))
    elif steps is not None:
        raise ValueError("steps ends the interleaving, got steps without it; set interleave=True")
    if steps is None and fraction != 0.75:
        raise ValueError(f"fraction is of the training, got {fraction!r} alone; give steps too")
    inner = by_node(collective, _routed(inner, over, densities(density), dense, partial))
    fed = remembered(memory, warmup, inner)
    if not no_feedback:
        return fed
    return Route(_unfed(no_feedback, memory), remembered("none", warmup, inner), fed)


def _unfed(no_feedback: Rule | Sequence[str], memory: str | Memory) -> Rule:
    unfed = rule("no_feedback", no_feedback)
    if memory == "none":
        raise ValueError(
            f"no_feedback says which parameters keep no residual, got {no_feedback!r} where none "
            "does (memory='none'); give one of them"
        )
    return unfed


def _routed(
    inner: Reducer, over: View, density: Density, dense: Rule | Sequence[str] | None, partial: bool
) -> Reducer:
    """What stays dense by the caller's rule, and what will by the clock."""
    stays: Rule = nothing
    if dense is not None:
        given = dense if callable(dense) else VectorsAnd(rule("dense", dense))
        stays = StaysDense(given, over, density)
        inner = Route(stays, _dense(), inner)
    if not partial:
        return inner
    choices = (("dense", _dense()), ("sparse", inner))
    return Planned(choices=choices, decide=Partial(density=density, always=stays))


def _period(
    interleave: bool | tuple[int, int] | None, estimate: bool | int
) -> tuple[int, int] | None:
    if not isinstance(estimate, bool) and (not isinstance(estimate, int) or estimate < 1):
        raise ValueError(
            f"estimate must be True, False or a first interval of turns, got {estimate!r}"
        )
    if interleave is None:
        interleave = bool(estimate)  # only flat turns have a threshold to estimate
    if interleave is False and estimate:
        raise ValueError(
            "estimate is for the flat turns of interleaving, got interleave=False; set "
            "interleave=True"
        )
    if isinstance(interleave, bool):
        return (1, 1) if interleave else None
    if not isinstance(interleave, tuple | list):
        raise ValueError(
            f"interleave must be True, False or a period, got {interleave!r}; (1, 1) changes every "
            "step"
        )
    return tuple(interleave)  # type: ignore[return-value]  # Alternate checks it


def _flat_pick(estimate: bool | int) -> Selector:
    if estimate is False:
        return topk
    return (
        Drifting() if estimate is True else Drifting(interval=estimate, shortest=min(5, estimate))
    )


def _until(steps: int | None, fraction: float) -> int | None:
    if not 0 <= fraction <= 1:
        raise ValueError(f"fraction must be in [0, 1] of the training, got {fraction!r}")
    if steps is None:
        return None
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(f"steps must be the number of steps of the training, got {steps!r}")
    return round(fraction * steps)
