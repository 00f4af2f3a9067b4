"""Combinators: reducers that hold reducers. Everything that is not a leaf is one of these.

Here are the small ones: `Warmup`, `Alternate` and `Scheduled` choose by the step, `InBasis` changes
the coordinates, `Watch` looks on. In files of their own: `Remember` (error feedback), `Route` (by
the parameter), `Choose` (by the clock), `ByNode` (dense inside nodes). Each passes the conservation
law through unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from thinwire.bucket import Bucket
from thinwire.comm.metered import unmetered
from thinwire.deliver import dense, dense_form, remembers
from thinwire.describe import parts, rebuilt, spell
from thinwire.layout import Layout
from thinwire.operand import Sum, working_dtype
from thinwire.payload import Mapped
from thinwire.protocols import Comm, Reduced, Reducer, Traffic
from thinwire.remember import Remember, memories, refuse_memory
from thinwire.route import Route, Rule
from thinwire.schedule import checked_whole, is_whole

__all__ = [
    "Alternate", "InBasis", "Remember", "Route", "Rule", "Scheduled", "Warmup", "Watch", "dense",
    "dense_form", "memories", "remembers",
]  # fmt: skip


@dataclass(frozen=True)
class Alternate:
    """`first` and `second` in turn, by the shared step, so that all ranks are in the same one.

    `period` says how many steps each has at a time; from step `until` on there is only `first`.
    """

    first: Reducer
    second: Reducer
    period: tuple[int, int] = (1, 1)
    until: int | None = None

    def __post_init__(self) -> None:
        if len(self.period) != 2 or not all(is_whole(n) and n >= 1 for n in self.period):
            raise ValueError(
                f"a period is two numbers of steps, 1 or more each, got {self.period!r}; (1, 1) "
                "changes every step"
            )

    __repr__ = spell

    def turns(self, step: int) -> list[tuple[str, Reducer]]:
        both = [("first", self.first), ("second", self.second)]
        return both if self._is_first(step) else both[::-1]

    def reduce(self, bucket: Bucket, comm: Comm) -> Reduced:
        path, reducer = self.turns(bucket.step)[0]
        return reducer.reduce(bucket.at(path), comm)

    def traffic(self, layout: Layout, world: int, step: int = 0) -> Traffic:
        return self.turns(step)[0][1].traffic(layout, world, step)

    def _is_first(self, step: int) -> bool:
        over = self.until is not None and step >= self.until
        return over or step % sum(self.period) < self.period[0]


@dataclass(frozen=True)
class Warmup:
    """Dense for the first `steps` steps, `then` from there on."""

    steps: int
    then: Reducer

    def __post_init__(self) -> None:
        checked_whole("warmup", self.steps, 0, "a number of steps, 0 for none")

    __repr__ = spell

    def turns(self, step: int) -> list[tuple[str, Reducer]]:
        then = ("", self.then)
        return [("", dense()), then] if step < self.steps else [then]

    def reduce(self, bucket: Bucket, comm: Comm) -> Reduced:
        return self.turns(bucket.step)[0][1].reduce(bucket, comm)

    def traffic(self, layout: Layout, world: int, step: int = 0) -> Traffic:
        return self.turns(step)[0][1].traffic(layout, world, step)


@dataclass(frozen=True)
class Scheduled:
    """A recipe some of whose numbers are functions of the step: built for each value they take.

    Parts hold no state, so the one of this step goes on where the one of the last step stopped.
    """

    recipe: Callable[..., Reducer]
    numbers: tuple[tuple[str, Callable[[int], float]], ...]
    given: tuple[tuple[str, Any], ...]
    changes: tuple[Callable[[Any], Any], ...] = ()

    def __post_init__(self) -> None:
        self.at(0)  # what cannot be built is refused now

    def at(self, step: int) -> Reducer:
        now = {name: number(step) for name, number in self.numbers}
        built = self.recipe(**dict(self.given), **now)
        for change in self.changes:
            built = rebuilt(built, change)
        return built

    def parts(self) -> Iterator[Any]:
        """Those it has at the first step; of which kind they are does not change."""
        return parts(self.at(0))

    def rebuilt(self, change: Callable[[Any], Any]) -> Scheduled:
        """Its parts exist only while a step lasts, so they are changed then."""
        return replace(self, changes=(*self.changes, change))

    def reduce(self, bucket: Bucket, comm: Comm) -> Reduced:
        return self.at(bucket.step).reduce(bucket, comm)

    def traffic(self, layout: Layout, world: int, step: int = 0) -> Traffic:
        return self.at(step).traffic(layout, world, step)

    __repr__ = spell


class Basis(Protocol):
    """An orthonormal change of coordinates, parameter by parameter."""

    def layout(self, layout: Layout) -> Layout: ...  # of the coefficients, same offsets

    def forward(self, flat: Tensor, layout: Layout) -> Tensor: ...

    def back(self, coefficients: Tensor, layout: Layout) -> Tensor: ...


@dataclass(frozen=True)
class InBasis:
    """`inner` at work on coefficients in another basis: what is small there is not sent."""

    basis: Basis
    inner: Reducer

    def __post_init__(self) -> None:
        why = "another basis could not be saved by parameter"
        refuse_memory(self.inner, "InBasis", why)

    __repr__ = spell

    def reduce(self, bucket: Bucket, comm: Comm) -> Reduced:
        x, layout = bucket.take(), bucket.layout
        coefficients = self.basis.forward(x.to(working_dtype(x.dtype)), layout)
        coefficients = bucket.poison(coefficients)
        inside = replace(bucket.at("basis"), flat=coefficients, layout=self.basis.layout(layout))
        reduced = self.inner.reduce(inside, comm)
        back = partial(self.basis.back, layout=layout)
        mean, sent = back(reduced.mean), Mapped(reduced.sent, back)
        return replace(reduced, mean=mean, sent=sent, undo=None, peak=math.inf)

    def traffic(self, layout: Layout, world: int, step: int = 0) -> Traffic:
        return self.inner.traffic(self.basis.layout(layout), world, step)


@dataclass(frozen=True, kw_only=True)
class Watch:
    """Looks on: `probe(grad, x, reduced, comm)` on all ranks, every `every` steps.

    It sits directly inside `Remember`, where x is the gradient plus the residual. What a probe
    itself sends is not counted.
    """

    inner: Reducer
    probe: Callable[[Tensor, Tensor, Reduced, Comm], Any]
    every: int = 1

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"every must be at least 1 step, got {self.every}")

    def reduce(self, bucket: Bucket, comm: Comm) -> Reduced:
        if bucket.step % self.every:
            return self.inner.reduce(bucket, comm)
        flat = bucket.flat
        grad = (flat.grad if isinstance(flat, Sum) else flat).clone()
        x = bucket.take().clone()
        reduced = self.inner.reduce(bucket, comm)
        self.probe(grad, x, reduced, unmetered(comm))
        return reduced

    __repr__ = spell

    def traffic(self, layout: Layout, world: int, step: int = 0) -> Traffic:
        return self.inner.traffic(layout, world, step)
