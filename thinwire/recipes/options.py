"""What recipes share: how `memory=`, `wire=`, `collective=` and `density=` are read and checked."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from thinwire.bucket import Bucket, View
from thinwire.collectives.cheapest import Cheapest
from thinwire.collectives.gather import AllGather
from thinwire.collectives.gtopk import GTopK
from thinwire.collectives.oktopk import OkTopk
from thinwire.collectives.slots import Slots
from thinwire.collectives.spardl import BlockQuota
from thinwire.collectives.split import SplitReduce
from thinwire.collectives.two_level import ByNode, TwoLevel, told
from thinwire.combinators import Remember, Rule, Scheduled, Warmup
from thinwire.layout import Layout, Slot
from thinwire.memory import MomentumCorrected, Residual
from thinwire.protocols import Collective, Memory, Reducer, Selector
from thinwire.reducers import Select
from thinwire.schedule import ByParameter, Density, Number, Which, checked_flag
from thinwire.wire import Wire
from thinwire.wire import wire as as_wire

Merge = str | Collective | TwoLevel | None
COLLECTIVES: dict[str, Callable[[bool], Collective | TwoLevel]] = {  # by whether counts vary
    "gather": lambda ragged: AllGather(ragged=ragged),
    "gtopk": lambda ragged: GTopK(ragged=ragged),
    "tree": lambda ragged: GTopK(ragged=ragged, tree=True),
    "topkdsa": lambda ragged: SplitReduce(),
    "oktopk": lambda ragged: OkTopk(),
    "slots": lambda ragged: Slots(),
    "spardl": lambda ragged: BlockQuota(),
    "cheapest": lambda ragged: Cheapest(),
    "two_level": lambda ragged: TwoLevel(),
}
Recipe = TypeVar("Recipe", bound=Callable[..., Reducer])
Densities = Number | Mapping[Which, Number]  # one, or one for each pattern or rule


@dataclass(frozen=True)
class Named:
    """A rule: the parameters in whose names one of these patterns is found."""

    patterns: tuple[str, ...]

    def __call__(self, slot: Slot) -> bool:
        return any(re.search(pattern, slot.name) for pattern in self.patterns)


# These take schedules by themselves; these say when, and cannot change with when it is.
_OWN = {"density", "rank", "decay"}
_FIXED = {"warmup", "seed", "every", "steps", "ramp"}


def schedulable(recipe: Recipe) -> Recipe:
    """Let every number of a recipe be a schedule, whether its parts know of steps or not.

    What is true or false must be one of these.
    """
    known = inspect.signature(recipe)
    numbers = {
        name
        for name, option in known.parameters.items()
        if re.search(r"\b(int|float)\b", str(option.annotation)) and "bool" not in option.annotation
    } - (_OWN | _FIXED)  # fmt: skip
    flags = {name for name, o in known.parameters.items() if o.annotation in (bool, "bool")}

    @functools.wraps(recipe)
    def built(*args: Any, **keywords: Any) -> Reducer:
        given = known.bind(*args, **keywords).arguments
        for name in flags & set(given):
            checked_flag(name, given[name])
        moving = {name: n for name, n in given.items() if name in numbers and callable(n)}
        if not moving:
            return recipe(*args, **keywords)
        rest = {name: value for name, value in given.items() if name not in moving}
        return Scheduled(recipe, tuple(moving.items()), tuple(rest.items()))

    return built  # type: ignore[return-value]


def rule(option: str, given: Rule | Sequence[str]) -> Rule:
    """A rule of the caller's: a function of the slot, or patterns for its name."""
    if callable(given):
        return given
    listed = isinstance(given, tuple | list | set | frozenset)
    if not listed or not all(isinstance(pattern, str) for pattern in given):
        raise ValueError(
            f"{option} must be a rule (slot -> bool) or a list of patterns, got {given!r}; e.g. "
            f"{option}=['head.*weight']"
        )
    for pattern in given:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{option}: {pattern!r} is not a pattern ({error})") from None
    return Named(tuple(given))


def sent_whole(layout: Layout, over: View, density: Density) -> bool:
    """Whether a view keeps every entry anyway; of a density that changes, nothing can be said."""
    numbers = [n for _, n in density.rules] if isinstance(density, ByParameter) else [density]
    if any(callable(number) for number in numbers):
        return False
    flat = torch.empty(layout.numel, device="meta")
    pieces = over(Bucket(flat=flat, layout=layout, state={}), density)
    return all(piece.k == piece.rows.shape[1] for piece in pieces)


def densities(density: Densities) -> Density:
    return ByParameter.of(density) if isinstance(density, Mapping) else density


def merge(collective: Merge, *, ragged: bool, own: Collective | None = None) -> Collective:
    """The caller's collective, or the recipe's own: an all-gather that takes the counts it has."""
    given = _named(collective, ragged) if isinstance(collective, str) else collective
    collective = given.between if isinstance(given, TwoLevel) else given
    if collective is not None and not callable(getattr(collective, "sum", None)):
        raise ValueError(f"collective must have sum(...), e.g. AllGather(), got {collective!r}")
    if ragged and not getattr(collective, "ragged", True):
        raise ValueError(
            f"this recipe's counts vary, got collective={collective!r}; use AllGather(ragged=True)"
        )
    return collective or own or AllGather(ragged=ragged)


def check_zero(collective: Collective, wire: Wire) -> None:
    """Where some parameters may go dense, the zeros between what was chosen must stay zeros."""
    if isinstance(collective, Cheapest) and not wire.values.keeps_zero:
        raise ValueError(
            f"{wire.values!r} has no zero, so no parameter could go dense and the cheapest "
            "collective would always gather; use another wire, such as wire='int8', or "
            "collective='gather'"
        )


def by_node(collective: Merge, inner: Reducer) -> Reducer:
    """Around what selects, if the caller wants two levels."""
    given = _named(collective, ragged=True) if isinstance(collective, str) else collective
    return ByNode(inner, told(given.nodes)) if isinstance(given, TwoLevel) else inner


def _named(name: str, ragged: bool) -> Collective | TwoLevel:
    size = re.fullmatch(r"two_level\((\d+)\)", name)
    if size:
        return TwoLevel(nodes=int(size[1]))
    if name not in COLLECTIVES:
        raise ValueError(
            f"collective must be one of {', '.join(COLLECTIVES)} (two_level(8) for nodes of 8), "
            f"got {name!r}"
        )
    return COLLECTIVES[name](ragged)


def sparse(
    pick: Selector,
    over: View,
    *,
    density: Densities,
    collective: Merge,
    memory: str | Memory,
    wire: str | Wire,
    warmup: int,
    ragged: bool = True,
    own: Collective | None = None,
) -> Reducer:
    """The frame of every sparse recipe: one Select, with a memory around it."""
    merged, coded = merge(collective, ragged=ragged, own=own), as_wire(wire)
    check_zero(merged, coded)
    select = Select(pick=pick, over=over, density=densities(density), collective=merged, wire=coded)
    return remembered(memory, warmup, by_node(collective, select))


def remembered(memory: str | Memory, warmup: int, inner: Reducer) -> Reducer:
    """Memory outside, warm-up inside it: a dense step delivers the residual at once."""
    inner = inner if warmup == 0 else Warmup(warmup, inner)
    kept = named_memory(memory)
    return inner if kept is None else Remember(inner, kept)


def named_memory(memory: str | Memory) -> Memory | None:
    if memory == "none":
        return None
    if memory == "residual":
        return Residual()
    if memory == "momentum":
        return MomentumCorrected()
    named = isinstance(memory, str | type)  # a class is not a memory yet
    if named or not (hasattr(memory, "fold") and hasattr(memory, "keep")):
        raise ValueError(
            f"memory must be 'none', 'residual' or 'momentum' (or a Memory), got {memory!r}"
        )
    assert not isinstance(memory, str)
    return memory
