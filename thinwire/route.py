"""Route: one reducer for some parameters, another for the rest, and their results as one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from torch import Tensor

from thinwire.bucket import Bucket
from thinwire.describe import spell
from thinwire.layout import Layout, Slot
from thinwire.payload import Parts, nothing
from thinwire.protocols import Comm, Reduced, Reducer, Traffic

Rule = Callable[[Slot], bool]


@dataclass(frozen=True)
class Route:
    """Parameters for which `rule` holds go to `yes`, the others to `no`.

    Both see the same flat buffer with fewer slots, so nothing is copied but payloads.
    """

    rule: Rule
    yes: Reducer
    no: Reducer

    def reduce(self, bucket: Bucket, comm: Comm) -> Reduced:
        results = []
        for name, part, reducer in self._branches(bucket.layout):
            child = replace(bucket, layout=part).at(name)
            results.append((part, reducer.reduce(child, comm)))
        return join(bucket, results)

    def traffic(self, layout: Layout, world: int, step: int = 0) -> Traffic:
        branches = self._branches(layout)
        return sum((r.traffic(part, world, step) for _, part, r in branches), Traffic())

    __repr__ = spell

    def _branches(self, layout: Layout) -> list[tuple[str, Layout, Reducer]]:
        if layout not in self._known:
            chosen = {slot.name for slot in layout.slots if self.rule(slot)}
            yes = tuple(slot for slot in layout.slots if slot.name in chosen)
            no = tuple(slot for slot in layout.slots if slot.name not in chosen)
            self._known[layout] = Layout(yes, layout.numel), Layout(no, layout.numel)
        both = zip(("yes", "no"), self._known[layout], (self.yes, self.no), strict=True)
        return [(name, part, reducer) for name, part, reducer in both if part.slots]

    @cached_property
    def _known(self) -> dict[Layout, tuple[Layout, Layout]]:
        """Which parameters go where, by layout: asked once, not every step."""
        return {}


def join(bucket: Bucket, results: list[tuple[Layout, Reduced]]) -> Reduced:
    """One result out of those of parts of a bucket, which may have written into one buffer."""
    if not results:
        return Reduced(mean=bucket.blank(), sent=nothing(bucket.layout.numel))
    mean = results[0][1].mean
    for part, reduced in results[1:]:
        if reduced.mean is not mean:
            for start, stop in part.runs:
                mean[start:stop] = reduced.mean[start:stop]
    done = [reduced for _, reduced in results]
    return combine(done, mean, finite=all(reduced.finite for reduced in done))


def combine(results: list[Reduced], mean: Tensor, *, finite: bool) -> Reduced:
    """All that these have sent, under one mean; nothing and no trace, if that is not finite."""
    undos = [reduced.undo for reduced in results if reduced.undo]
    if not finite:
        for undo in undos:
            undo()
        return Reduced(mean=mean, sent=nothing(mean.numel()), finite=False)
    return Reduced(
        mean=mean,
        sent=Parts(tuple((0, reduced.sent) for reduced in results), mean.numel()),
        undo=(lambda: [undo() for undo in undos]) if undos else None,
        unused=tuple(name for reduced in results for name in reduced.unused),
        kept=sum(reduced.entries for reduced in results),
        peak=max(reduced.peak for reduced in results),
    )
