"""`auto`: whichever of the recipes that keep accuracy turns out fastest where it runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Unpack

from thinwire import evidence
from thinwire.choose import Choose, Fastest
from thinwire.combinators import Remember, memories
from thinwire.protocols import Reducer
from thinwire.recipes.alldimension import adtopk
from thinwire.recipes.frame import frame, route_dense
from thinwire.recipes.lowrank import acpsgd, powersgd, randomk
from thinwire.recipes.merging import gtopk, oktopk, slots, spardl, topkdsa
from thinwire.recipes.options import Densities, Shared
from thinwire.recipes.recipe import recipe
from thinwire.recipes.sparse import topk
from thinwire.recipes.values import bf16, dense, half, int4, int8
from thinwire.schedule import Flushed, Whole

KNOWN: dict[str, Callable[..., Reducer]] = {
    choice.__name__: choice
    for choice in (
        topk, adtopk, acpsgd, powersgd, oktopk, slots, gtopk, topkdsa, spardl, randomk, bf16, half,
        int8, int4, dense,
    )
}  # fmt: skip
FINALS = 0.15  # of the shortest step: who is as near as that is tried once more
TOLERANCE = 1.0  # percent of accuracy


@recipe()
def auto(
    density: Densities = 0.01,
    *,
    rank: Whole = 4,
    among: Sequence[str] | None = None,
    tolerance: float = TOLERANCE,
    tries: int = 6,
    **shared: Unpack[Shared],
) -> Reducer:
    """The fastest of the recipes that keep accuracy.

    Each is tried for some steps, then all ranks agree. Those within 15 % of the fastest are tried
    twice. Every other step is dense meanwhile, and dense stays unless another is 3 % faster. What
    one has left over the next one sends, so no gradient is lost. The choice is saved with the
    state; `sync.replan()` asks for a new one. It depends on times, so two trainings may differ.

    Args:
        density: Share of the entries that are sent, for those that take one.
        rank: Columns of a factor, for those that take one.
        among: The recipes, by name; "dense" must be one of them. None takes those whose cost was
            within the tolerance in every recorded training.
        tolerance: Cost in accuracy that is accepted, in percent.
        tries: Steps for which each is tried.
        **shared: See `thinwire.recipes.options.Shared`.

    Example:
        auto(density=0.01, among=("dense", "topk", "slots"))

    Source: our own; `thinwire plan` predicts the outcome.
    """
    numbers = {"density": density, "rank": rank}
    _check(among, tolerance, numbers)
    tried = recorded(tolerance, **numbers) if among is None else among
    names = ["dense", *(name for name in tried if name != "dense")]
    choices = tuple((name, _bare(KNOWN[name], **numbers)) for name in names)
    plan = Choose(choices=choices, decide=Fastest(), tries=tries, finals=FINALS)
    return frame(route_dense(plan, shared), shared)


def recorded(tolerance: float, **numbers: Any) -> list[str]:
    """The recipes that cost no more than this in any recorded training with these numbers.

    >>> recorded(1.0, density=0.01, rank=4)
    ['bf16', 'half', 'int8', 'dense']
    """
    calls = {name: ", ".join(f"{key}={value!r}" for key, value in _taken(known, numbers).items())
             for name, known in KNOWN.items()}  # fmt: skip
    worst = {name: evidence.worst(evidence.find(f"{name}({call})")) for name, call in calls.items()}
    return [name for name, trial in worst.items() if trial and trial.cost <= tolerance]


def _check(among: Sequence[str] | None, tolerance: float, numbers: dict[str, Any]) -> None:
    if isinstance(numbers["density"], Flushed):
        raise ValueError(
            "auto may choose a recipe without a density, which no flush empties, got "
            f"{numbers['density']!r}; give a density, and call sync.pause() before the last step"
        )
    if not tolerance >= 0:
        raise ValueError(f"tolerance is a percentage of accuracy, 0 or more, got {tolerance!r}")
    if among is None:
        return
    if tolerance != TOLERANCE:
        raise ValueError(
            f"tolerance={tolerance} chooses from recorded trainings, among={tuple(among)!r} names "
            "recipes itself; give one of them"
        )
    unknown = [name for name in among if name not in KNOWN]
    if unknown or "dense" not in among or len(set(among)) != len(among):
        raise ValueError(
            f"among takes dense and some of {', '.join(KNOWN)}, each once, got {tuple(among)!r}"
        )
    for (option, given), usual in zip(numbers.items(), (0.01, 4), strict=True):
        takers = [name for name in KNOWN if option in inspect.signature(KNOWN[name]).parameters]
        if given != usual and not set(takers) & set(among):
            raise ValueError(
                f"{option} is for {', '.join(takers)}, got {option}={given!r} with "
                f"among={tuple(among)!r}; add one of them"
            )


def _taken(function: Callable[..., Reducer], numbers: dict[str, Any]) -> dict[str, Any]:
    """Those of the numbers that the recipe takes."""
    known = inspect.signature(function).parameters
    return {name: value for name, value in numbers.items() if name in known}


def _bare(function: Callable[..., Reducer], **numbers: Any) -> Reducer:
    """The recipe without a memory of its own: there is one around all of them."""
    reducer = function(**_taken(function, numbers))
    bare = reducer.inner if isinstance(reducer, Remember) else reducer
    assert not memories(bare), f"{function.__name__} keeps a memory inside"
    return bare
