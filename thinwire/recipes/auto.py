"""`auto`: whichever of a few recipes turns out fastest where it runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from thinwire.combinators import Remember, memories
from thinwire.planned import Fastest, Planned
from thinwire.protocols import Memory, Reducer
from thinwire.recipes.alldimension import adtopk
from thinwire.recipes.lowrank import acpsgd, powersgd, randomk
from thinwire.recipes.merging import gtopk, oktopk, slots, spardl, topkdsa
from thinwire.recipes.options import remembered
from thinwire.recipes.sparse import topk
from thinwire.recipes.values import bf16, dense, half, int8
from thinwire.schedule import Flushed

KNOWN: dict[str, Callable[..., Reducer]] = {
    recipe.__name__: recipe
    for recipe in (
        topk, adtopk, acpsgd, powersgd, oktopk, slots, gtopk, topkdsa, spardl, randomk, bf16, half,
        int8, dense,
    )
}  # fmt: skip
FINALS = 0.15  # of the shortest step: who is as near as that is tried once more
AMONG = ("topk", "adtopk", "acpsgd", "slots", "bf16", "dense")


def auto(
    density: float = 0.01,
    *,
    rank: int = 4,
    among: Sequence[str] = AMONG,
    tries: int = 6,
    memory: str | Memory = "residual",
    warmup: int = 0,
) -> Reducer:
    """The recipe whose steps are shortest here: each is tried for some steps, then all ranks agree.

    `among` names them; those within 15 % of the fastest are tried twice. Dense must be one of them,
    has every other step meanwhile, and stays unless another is 3 % faster. What one has left over
    the next one sends, so no gradient is lost on the way. The choice is saved with the state;
    `sync.replan()` asks for a new one. It depends on times, so two trainings may differ.
    Source: our own; `thinwire plan` predicts the outcome.
    """
    unknown = [name for name in among if name not in KNOWN]
    if unknown or "dense" not in among or len(set(among)) != len(among):
        raise ValueError(
            f"among takes dense and some of {', '.join(KNOWN)}, each once, got {tuple(among)!r}"
        )
    for option, given, usual in (("density", density, 0.01), ("rank", rank, 4)):
        takers = [name for name in KNOWN if option in inspect.signature(KNOWN[name]).parameters]
        if given != usual and not set(takers) & set(among):
            raise ValueError(
                f"{option} is for {', '.join(takers)}, got {option}={given!r} with "
                f"among={tuple(among)!r}; add one of them"
            )
    if isinstance(density, Flushed):
        raise ValueError(
            f"auto may choose a recipe without a density, which no flush empties, got {density!r}; "
            "give a density, and call sync.pause() before the last step"
        )
    names = ["dense", *(name for name in among if name != "dense")]
    choices = tuple((name, _bare(KNOWN[name], density=density, rank=rank)) for name in names)
    plan = Planned(choices=choices, decide=Fastest(), tries=tries, finals=FINALS)
    return remembered(memory, warmup, plan)


def _bare(recipe: Callable[..., Reducer], **numbers: Any) -> Reducer:
    """The recipe without a memory of its own: there is one around all of them."""
    known = inspect.signature(recipe).parameters
    reducer = recipe(**{name: value for name, value in numbers.items() if name in known})
    bare = reducer.inner if isinstance(reducer, Remember) else reducer
    assert not memories(bare), f"{recipe.__name__} keeps a memory inside"
    return bare
