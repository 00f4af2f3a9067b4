"""The options that recipes share: what they mean, their defaults, and how they are read.

A recipe takes `**shared: Unpack[Sparse]`, so each of these is written down once, here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from thinwire import collectives
from thinwire.bucket import View, by_layer, whole
from thinwire.collectives import AllGather, TwoLevel
from thinwire.combinators import Rule
from thinwire.layout import Slot
from thinwire.memory import MomentumCorrected, Residual
from thinwire.protocols import Collective, CollectivePromises, Memory, Selector, promised
from thinwire.schedule import ByParameter, Density, Number, Which, is_whole
from thinwire.selectors.drift import Drifting
from thinwire.selectors.topk import topk
from thinwire.wire import Wire

Merge = str | Collective | TwoLevel | None
Densities = Number | Mapping[Which, Number]  # one, or one for each pattern or rule
Parameters = Rule | Sequence[str]  # a rule, or patterns that are found in names


class Shared(TypedDict, total=False):
    """Options of every recipe but `dense`.

    Args:
        memory: What becomes of values that are not sent. "residual" adds them to the next gradient.
            "momentum" applies momentum before that, and the optimizer must have none. "none" drops
            them. Or a memory with its options, such as Residual(learning_rate=True).
        warmup: Steps at the start that average densely.
        dense: Parameters that are averaged exactly: a rule such as `vectors`, or a list of patterns
            to find in their names.
        no_feedback: Parameters that keep no residual: a rule, or a list of patterns.
    """

    memory: str | Memory
    warmup: int
    dense: Parameters | None
    no_feedback: Parameters


class Wired(Shared, total=False):
    """Options of recipes whose values may be coded.

    Args:
        wire: How values travel, and after a plus how indices do: "fp32", "bf16", "int8+auto".
    """

    wire: str | Wire


class Sparse(Wired, total=False):
    """Options of every sparse recipe.

    Args:
        collective: Who adds up what ranks have chosen: "gather", "gtopk", "tree", "topkdsa",
            "oktopk", "slots", "spardl", "two_level(8)" for nodes of 8 workers, or a collective with
            its options. "cheapest" sends each parameter by all-reduce or by all-gather, whichever
            is fewer bytes. None is the recipe's own.
        partial: Time sparse and dense for some steps, then send densely what compression does not
            speed up. The others send less, so that the total stays the same.
        estimate: Reuse the threshold of exact top-k until it has drifted. A number is the first
            interval in steps, True is 5. It costs more time than it saves (docs/algorithms.md).
    """

    collective: Merge
    partial: bool
    estimate: bool | int


USUAL: dict[str, Any] = {
    "memory": "residual", "warmup": 0, "dense": None, "no_feedback": (), "wire": "fp32",
    "collective": None, "partial": False, "estimate": False,
}  # fmt: skip
COLLECTIVES: dict[str, Callable[[bool], Collective | TwoLevel]] = {  # by whether counts vary
    "gather": lambda ragged: AllGather(ragged=ragged),
    "gtopk": lambda ragged: collectives.GTopK(ragged=ragged),
    "tree": lambda ragged: collectives.GTopK(ragged=ragged, tree=True),
    "topkdsa": lambda ragged: collectives.SplitReduce(),
    "oktopk": lambda ragged: collectives.OkTopk(),
    "slots": lambda ragged: collectives.Slots(),
    "spardl": lambda ragged: collectives.BlockQuota(),
    "cheapest": lambda ragged: collectives.Cheapest(),
    "two_level": lambda ragged: TwoLevel(),
}
MEMORIES: dict[str, Memory | None] = {
    "none": None, "residual": Residual(), "momentum": MomentumCorrected(),
}  # fmt: skip


@dataclass(frozen=True)
class Named:
    """A rule: the parameters in whose names one of these patterns is found."""

    patterns: tuple[str, ...]

    def __call__(self, slot: Slot) -> bool:
        return any(re.search(pattern, slot.name) for pattern in self.patterns)


def read_rule(option: str, given: Parameters) -> Rule:
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


def read_density(density: Densities) -> Density:
    """One density, or one for each of several patterns and rules."""
    return ByParameter.of(density) if isinstance(density, Mapping) else density


def read_collective(
    collective: Merge, *, ragged: bool, own: Collective | None = None
) -> Collective:
    """The caller's collective, or the recipe's own: an all-gather that takes the counts it has."""
    given = named_collective(collective, ragged)
    collective = given.between if isinstance(given, TwoLevel) else given
    if collective is not None and not callable(getattr(collective, "sum", None)):
        raise ValueError(f"collective must have sum(...), e.g. AllGather(), got {collective!r}")
    if ragged and not promised(CollectivePromises, collective).ragged:
        raise ValueError(
            f"this recipe's counts vary, got collective={collective!r}; use AllGather(ragged=True)"
        )
    return collective or own or AllGather(ragged=ragged)


def named_collective(name: Merge, ragged: bool) -> Collective | TwoLevel | None:
    """The collective of that name, for counts that vary or do not; what is no name, as it is."""
    if not isinstance(name, str):
        return name
    size = re.fullmatch(r"two_level\((\d+)\)", name)
    if size:
        return TwoLevel(nodes=int(size[1]))
    if name not in COLLECTIVES:
        raise ValueError(
            f"collective must be one of {', '.join(COLLECTIVES)} (two_level(8) for nodes of 8), "
            f"got {name!r}"
        )
    return COLLECTIVES[name](ragged)


def read_memory(memory: str | Memory) -> Memory | None:
    """The memory of that name, or the memory itself; None if nothing is kept."""
    if isinstance(memory, str) and memory in MEMORIES:
        return MEMORIES[memory]
    named = isinstance(memory, str | type)  # a class is not a memory yet
    if named or not (hasattr(memory, "fold") and hasattr(memory, "keep")):
        raise ValueError(
            f"memory must be 'none', 'residual' or 'momentum' (or a Memory), got {memory!r}"
        )
    assert not isinstance(memory, str)
    return memory


def read_estimate(estimate: bool | int, pick: Selector, over: View) -> Selector:
    """The selector itself, or one that reuses its threshold."""
    if not isinstance(estimate, bool) and not (is_whole(estimate) and estimate >= 1):
        raise ValueError(
            f"estimate must be True, False or a first interval of turns, got {estimate!r}"
        )
    if estimate is False:
        return pick
    if pick is not topk or over not in (by_layer, whole):
        raise ValueError(
            f"estimate is for exact top-k of whole layers or buckets, got estimate={estimate!r} "
            "with a recipe that chooses otherwise; use topk(estimate=True) or "
            "adtopk(interleave=True, estimate=True)"
        )
    return (
        Drifting() if estimate is True else Drifting(interval=estimate, shortest=min(5, estimate))
    )
