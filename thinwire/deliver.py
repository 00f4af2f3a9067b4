"""Deliver: what `pause()` turns a recipe into, so that every residual goes out at once.

What a memory holds is sent dense. Branches that take turns all send what they hold, not only the
one whose turn it is (`Drained`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from thinwire import kernels
from thinwire.bucket import Bucket
from thinwire.describe import parts, rebuilt, rebuilt_inside, spell
from thinwire.frames.shared import Identity
from thinwire.layout import Layout
from thinwire.memory import MomentumCorrected, Residual
from thinwire.protocols import Comm, Reduced, Reducer, Traffic
from thinwire.reducers import Project
from thinwire.remember import Remember, memories
from thinwire.route import combine


def dense() -> Reducer:
    """Plain averaging, what every combinator falls back to."""
    return Project(frame=Identity())


def remembers(recipe: Reducer) -> bool:
    """Whether a residual may be held anywhere in it; of a foreign reducer we must assume so."""
    known = (recipe, *filter(_is_reducer, parts(recipe)))
    foreign = [part for part in known if not type(part).__module__.startswith("thinwire.")]
    return bool(memories(recipe) or foreign)


def dense_form(recipe: Reducer) -> Reducer:
    """The same memories around plain averaging: what delivers every residual at once.

    One rule for every combinator, ours or not: what a memory holds is dense, what has no memory
    in it is dense, and of branches that take turns all deliver what they hold.
    """
    form: Reducer = rebuilt(recipe, _dense_part)
    return form


def _dense_part(part: Any) -> Any:
    if isinstance(part, Remember):
        return replace(part, inner=dense())
    if not _is_reducer(part):
        return part
    if not memories(part):
        return dense()
    return Drained(rebuilt_inside(part, _dense_part)) if hasattr(part, "turns") else part


def _is_reducer(part: Any) -> bool:
    return hasattr(part, "reduce") and not isinstance(part, type)


class Chooser(Protocol):
    """A combinator whose branches take turns by the step."""

    def turns(self, step: int) -> list[tuple[str, Reducer]]: ...  # by path; first whose turn it is

    def traffic(self, layout: Layout, world: int, step: int = 0) -> Traffic: ...


@dataclass(frozen=True)
class Drained:
    """The branch whose turn it is, and with it what is held by those whose turn it is not."""

    chooser: Chooser

    __repr__ = spell

    def reduce(self, bucket: Bucket, comm: Comm) -> Reduced:
        (path, reducer), *others = self.chooser.turns(bucket.step)
        held = [(p, rebuilt(r, hand_over)) for p, r in others if memories(r)]
        silent = [replace(child(bucket, p), flat=torch.zeros_like(bucket.take())) for p, _ in held]
        results = [reducer.reduce(child(bucket, path), comm)]
        results += [r.reduce(b, comm) for b, (_, r) in zip(silent, held, strict=True)]
        mean, runs = results[0].mean.clone(), bucket.layout.runs
        for start, stop in runs:
            for reduced in results[1:]:
                mean[start:stop] += reduced.mean[start:stop]
        finite = all(kernels.finite(mean[start:stop]) for start, stop in runs)
        both = combine(results, mean, finite=finite)
        if not finite:
            return both
        first = results[0]
        return replace(both, unused=first.unused, kept=first.entries, peak=math.inf)

    def traffic(self, layout: Layout, world: int, step: int = 0) -> Traffic:
        (_, reducer), *others = self.chooser.turns(step)
        held = [r.traffic(layout, world, step) for _, r in others if memories(r)]
        return sum(held, reducer.traffic(layout, world, step))


def hand_over(part: Any) -> Any:
    """What is held, as it is: it is nobody's turn to fade, or to gather momentum."""
    if isinstance(part, Residual | MomentumCorrected):
        return Residual(learning_rate=part.learning_rate)
    return part


def child(bucket: Bucket, path: str) -> Bucket:
    return bucket.at(path) if path else bucket
