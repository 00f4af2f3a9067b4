"""Remember: error feedback around any reducer. What is not sent is kept for the next step."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from thinwire.bucket import Bucket
from thinwire.describe import parts, spell
from thinwire.layout import Layout, Slot
from thinwire.memory import Residual
from thinwire.operand import magnitude
from thinwire.payload import Without, nothing
from thinwire.protocols import (
    CollectivePromises,
    Comm,
    Memory,
    MemoryPromises,
    Reduced,
    Reducer,
    Traffic,
    promised,
)

log = logging.getLogger(__name__)


def memories(recipe: Any) -> list[Memory]:
    """All memories somewhere in a recipe."""
    return [part for part in parts(recipe) if hasattr(part, "fold") and hasattr(part, "keep")]


def refuse_memory(inner: Any, outside: str, why: str) -> None:
    """Raise ValueError if what this combinator holds keeps a memory of its own."""
    if memories(inner):
        raise ValueError(
            f"a memory inside {why}; put Remember outside: Remember({outside}(...)), got {inner}"
        )


@dataclass(frozen=True)
class Remember:
    """What was not sent is kept, and added to the next gradient.

    Residuals are in unscaled units: a bucket that carries a loss scale is divided by it on the
    way in, and the mean is multiplied by it on the way out; learning rates likewise, if the memory
    holds them. `sent` is in the memory's units. A step that some rank could not take is one in
    which nothing was sent; entries so large that no later sum could hold them are then dropped.
    """

    inner: Reducer
    memory: Memory = field(default_factory=Residual)

    def __post_init__(self) -> None:
        if memories(self.inner):
            raise ValueError(
                f"a memory inside a memory would count everything twice, got {self.inner}; keep one"
            )
        owners = [
            part
            for part in parts(self.inner)
            if promised(CollectivePromises, part).keeps != "sender"
        ]
        if owners and promised(MemoryPromises, self.memory).corrects_momentum:
            raise ValueError(
                f"momentum correction needs a collective in which the sender keeps what is "
                f"dropped; in {owners[0]} the owner of a region does: use AllGather() or "
                "memory='residual'"
            )

    __repr__ = spell

    def reduce(self, bucket: Bucket, comm: Comm) -> Reduced:
        folded = self.memory.fold(bucket, comm.size)
        reduced = self.inner.reduce(replace(bucket, flat=folded), comm)
        if not reduced.finite:  # sent = 0: the residual is x, non-finite entries left out
            _drop_overflow(bucket, folded.units, comm.size)
            return replace(reduced, undo=None)
        reduced = _without_unused(reduced, bucket.layout)
        reduced = _in_gradients_units(reduced, folded.units)
        reduced = _rescale(reduced, bucket.scale, bucket.layout, comm.size)
        if not reduced.finite:
            _drop_overflow(bucket, folded.units, comm.size)
            return replace(reduced, sent=nothing(bucket.layout.numel), undo=None)
        undo = self.memory.keep(folded.residual, reduced.sent, bucket)
        return replace(reduced, undo=undo)

    def traffic(self, layout: Layout, world: int, step: int = 0) -> Traffic:
        return self.inner.traffic(layout, world, step)


def _drop_overflow(bucket: Bucket, units: list[tuple[Slot, float]], world: int) -> None:
    """After a step that could not be sent: what would overflow every later sum too is dropped.

    Finite entries may be too large to be added up, and would wait for ever. A sum of all entries of
    all ranks has room for what is kept, in the units of the gradient and under its loss scale.
    """
    most = torch.finfo(torch.float32).max / (2 * world * max(1, bucket.layout.size))
    most /= max(1.0, bucket.scale)
    unit, dropped = {slot.name: unit for slot, unit in units}, 0
    for slot in bucket.layout.slots:
        for kept in bucket.scope("memory").of(slot).values():
            if isinstance(kept, Tensor) and kept.is_floating_point():
                large = ~(kept.abs() <= most / max(1.0, unit.get(slot.name, 1.0)))
                dropped += int(large.sum())
                kept.masked_fill_(large, 0.0)
    if dropped:
        log.warning(
            "step %d could not be sent: %d entries that waited were too large for any sum of %d "
            "ranks, and are dropped",
            bucket.step, dropped, world,
        )  # fmt: skip


def _without_unused(reduced: Reduced, layout: Layout) -> Reduced:
    """Nothing is sent for parameters that no rank used: DDP would throw their mean away."""
    return _without(reduced, [slot for slot in layout.slots if slot.name in reduced.unused])


def _in_gradients_units(reduced: Reduced, units: list[tuple[Slot, float]]) -> Reduced:
    for slot, unit in units:
        if unit not in (0.0, 1.0):
            reduced.mean[slot.offset : slot.stop].mul_(unit)
    largest = max((unit for _, unit in units), default=1.0)
    reduced = replace(reduced, peak=reduced.peak * largest if largest else 0.0)
    return _without(reduced, [slot for slot, unit in units if unit == 0.0])


def _rescale(reduced: Reduced, scale: float, layout: Layout, world: int) -> Reduced:
    """Our slots of the mean times the loss scale, and whether they are still finite, P times too:
    what rounding has done to a mean, its owner's share holds P times.

    The buffer may hold slots of other branches of a `Route`: those are not ours to touch.
    """
    mean, peak = reduced.mean, reduced.peak * scale
    if scale != 1.0:
        for start, stop in layout.runs:
            mean[start:stop].mul_(scale)
    most = torch.finfo(mean.dtype).max / world
    if peak < most / 2:  # far enough for every rounding on the way
        return replace(reduced, peak=peak)
    finite = all(magnitude(mean[start:stop]) <= most for start, stop in layout.runs)
    return replace(reduced, peak=math.inf, finite=finite)


def _without(reduced: Reduced, gone: list[Slot]) -> Reduced:
    """Nothing is sent for these: their mean is zero, and what they hold stays."""
    if not gone:
        return reduced
    gaps = tuple((slot.offset, slot.stop) for slot in gone)
    for start, stop in gaps:
        reduced.mean[start:stop] = 0.0
    return replace(reduced, sent=Without(reduced.sent, gaps))
