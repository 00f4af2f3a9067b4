"""Remember: error feedback around any reducer. What is not sent is kept for the next step."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch

from thinwire import kernels
from thinwire.bucket import Bucket
from thinwire.describe import parts
from thinwire.layout import Layout, Slot
from thinwire.memory import Residual
from thinwire.payload import Without, nothing
from thinwire.protocols import Comm, Memory, Reduced, Reducer, Traffic


@dataclass(frozen=True)
class Remember:
    """What was not sent is kept, and added to the next gradient.

    Residuals are in unscaled units: a bucket that carries a loss scale is divided by it on the
    way in, and the mean is multiplied by it on the way out; learning rates likewise, if the memory
    holds them. `sent` is in the memory's units.
    """

    inner: Reducer
    memory: Memory = field(default_factory=Residual)

    def __post_init__(self) -> None:
        if isinstance(self.inner, Remember):
            raise ValueError(
                f"a memory inside a memory would count everything twice, got {self.inner}; keep one"
            )
        owners = [p for p in parts(self.inner) if getattr(p, "keeps", "sender") != "sender"]
        if owners and getattr(self.memory, "corrects_momentum", False):
            raise ValueError(
                f"momentum correction needs a collective in which the sender keeps what is "
                f"dropped; in {owners[0]} the owner of a region does: use AllGather() or "
                "memory='residual'"
            )

    def reduce(self, bucket: Bucket, comm: Comm) -> Reduced:
        folded = self.memory.fold(bucket, comm.size)
        reduced = self.inner.reduce(replace(bucket, flat=folded), comm)
        if not reduced.finite:  # sent = 0: the residual is x, non-finite entries left out
            return replace(reduced, undo=None)
        reduced = _without_unused(reduced, bucket.layout)
        reduced = _in_gradients_units(reduced, folded.units)
        reduced = _rescaled(reduced, bucket.scale, bucket.layout)
        if not reduced.finite:
            return replace(reduced, sent=nothing(bucket.layout.numel), undo=None)
        undo = self.memory.keep(folded.residual, reduced.sent, bucket)
        return replace(reduced, undo=undo)

    def traffic(self, layout: Layout, world: int, step: int = 0) -> Traffic:
        return self.inner.traffic(layout, world, step)


def _without_unused(reduced: Reduced, layout: Layout) -> Reduced:
    """Nothing is sent for parameters that no rank used: DDP would throw their mean away."""
    return _without(reduced, [slot for slot in layout.slots if slot.name in reduced.unused])


def _in_gradients_units(reduced: Reduced, units: list[tuple[Slot, float]]) -> Reduced:
    for slot, unit in units:
        if unit not in (0.0, 1.0):
            reduced.mean[slot.offset : slot.offset + slot.numel].mul_(unit)
    largest = max((unit for _, unit in units), default=1.0)
    reduced = replace(reduced, peak=reduced.peak * largest if largest else 0.0)
    return _without(reduced, [slot for slot, unit in units if unit == 0.0])


def _rescaled(reduced: Reduced, scale: float, layout: Layout) -> Reduced:
    """Our slots of the mean times the loss scale, and whether they are still finite.

    The buffer may hold slots of other branches of a `Route`: those are not ours to touch.
    """
    mean, peak = reduced.mean, reduced.peak * scale
    if scale != 1.0:
        for start, stop in layout.runs:
            mean[start:stop].mul_(scale)
    if peak < torch.finfo(mean.dtype).max / 2:  # far enough for every rounding on the way
        return replace(reduced, peak=peak)
    finite = all(kernels.finite(mean[start:stop]) for start, stop in layout.runs)
    return replace(reduced, peak=math.inf, finite=finite)


def _without(reduced: Reduced, gone: list[Slot]) -> Reduced:
    """Nothing is sent for these: their mean is zero, and what they hold stays."""
    if not gone:
        return reduced
    gaps = tuple((slot.offset, slot.offset + slot.numel) for slot in gone)
    for start, stop in gaps:
        reduced.mean[start:stop] = 0.0
    return replace(reduced, sent=Without(reduced.sent, gaps))
