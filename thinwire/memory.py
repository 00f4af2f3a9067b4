"""Memories: what becomes of the gradient that was not sent this step.

A memory hands on an unevaluated `Sum`; whoever needs the numbers calls `take()`, which adds the
gradient into the residual in place. After the exchange the residual is `x - sent`, with `sent`
this rank's true share of the mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.bucket import Bucket
from thinwire.operand import Sum, working_dtype
from thinwire.payload import Payload, find_chosen
from thinwire.schedule import Number, at, checked_flag


@dataclass(frozen=True, kw_only=True)
class Residual:
    """Plain error feedback: what was not sent is added to the next gradient.

        x = decay * residual + gradient;    residual = x - sent

    Seide et al. 2014; Karimireddy et al. 2019 (arXiv 1901.09847).

    Args:
        decay: What the residual is multiplied by in every step, in [0, 1].
        learning_rate: Keep rate * gradient, so that what waits keeps the rate it was computed at.
            Means are handed back divided by the rate of the day.

    Example:
        >>> Residual(decay=0.9).decay
        0.9
    """

    decay: Number = 1.0
    learning_rate: bool = False

    def __post_init__(self) -> None:
        if not callable(self.decay):
            _checked_share("decay", self.decay)
        checked_flag("learning_rate", self.learning_rate)

    def fold(self, bucket: Bucket, world: int) -> Sum:
        grad = _gradient(bucket)
        residual = _flat(bucket, "residual", grad)
        decay = self.decay  # a constant was checked when it was given
        if callable(decay):
            decay = _checked_share("decay", decay(bucket.step))
        if decay != 1.0:
            residual.mul_(decay)
        return _rated(residual, grad, bucket, 1.0 / bucket.scale, self.learning_rate)

    def keep(self, x: Tensor, sent: Payload, bucket: Bucket) -> Callable[[], object]:
        sent.add_into(x, alpha=-1.0)
        return partial(sent.add_into, x)


MASKINGS = ("timely", "always", "never")


@dataclass(frozen=True, kw_only=True)
class MomentumCorrected:
    """DGC: momentum is applied before selection, on every worker, instead of in the optimizer.

        plain:     u = m u + g;      v = v + u            nesterov:  u = m (u + g);  v = v + u + g

    v is what waits to be sent: v - sent is kept. The optimizer must have no momentum of its own. A
    dense share (warm-up), and a parameter that was sent whole, leave u as it is, which is ordinary
    momentum. Lin et al. 2018 (arXiv 1712.01887), section 3.

    Args:
        momentum: m, in [0, 1].
        nesterov: Look ahead, as torch.optim.SGD does.
        clip: Norm at which every parameter's local gradient is held first, over sqrt(workers).
        masking: What becomes of u where this rank's own choice was sent. "always", as published,
            clears it, so that stale momentum does not push on. But of a parameter that is sent
            often, little is stale and all momentum is lost. "timely" multiplies it by
            d / (1 - m (1 - d)), where d is the share of the parameter that was sent: the chance to
            be sent again before the momentum has faded. "never" leaves it.
        learning_rate: v holds rate * u, as in `Residual`.

    Example:
        >>> MomentumCorrected(momentum=0.95).masking
        'timely'
    """

    momentum: Number = 0.9
    nesterov: bool = False
    clip: float | None = None
    masking: str = "timely"
    learning_rate: bool = False
    corrects_momentum: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not callable(self.momentum):
            _checked_share("momentum", self.momentum)
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"clip must be a norm above 0, or None, got {self.clip!r}")
        if self.masking not in MASKINGS:
            raise ValueError(f"masking is one of {', '.join(MASKINGS)}, got {self.masking!r}")
        checked_flag("nesterov", self.nesterov)
        checked_flag("learning_rate", self.learning_rate)

    def fold(self, bucket: Bucket, world: int) -> Sum:
        grad = _gradient(bucket)
        u, v = _flat(bucket, "momentum", grad), _flat(bucket, "residual", grad)
        grad = grad.to(u.dtype)
        m = _checked_share("momentum", at(self.momentum, bucket.step))
        if self.nesterov or self.clip is not None:
            finite = self._look_ahead(u, grad, m, bucket, world)
            folded = _rated(v, grad, bucket, 1.0, self.learning_rate)
        else:
            finite = True
            for start, stop in bucket.layout.runs:
                here = slice(start, stop)
                finite &= kernels.accumulate(u[here], grad[here], 1.0 / bucket.scale, m)
            folded = _rated(v, u, bucket, 1.0, self.learning_rate, scratch=grad)
        folded.finite = finite
        return folded

    def _look_ahead(self, u: Tensor, grad: Tensor, m: float, bucket: Bucket, world: int) -> bool:
        """Parameter by parameter: clip, then what is added to v in place of the gradient; whether
        all was finite."""
        finite = True
        for slot in bucket.layout.slots:
            here = slice(slot.offset, slot.stop)
            finite &= _cleaned(grad[here], 1.0 / bucket.scale)
            if self.clip is not None:
                _clipped(grad[here], self.clip / math.sqrt(world))
            kernels.accumulate(u[here], grad[here], 1.0, 1.0 if self.nesterov else m)
            if self.nesterov:
                kernels.accumulate(grad[here], u[here].mul_(m))
            else:
                grad[here] = u[here]
        return finite

    def keep(self, x: Tensor, sent: Payload, bucket: Bucket) -> Callable[[], object]:
        sent.add_into(x, alpha=-1.0)
        index = None if self.masking == "never" else find_chosen(sent)
        if index is None:
            return partial(sent.add_into, x)
        u = _flat(bucket, "momentum", x)
        before = u[index]
        u[index] = before * self._left(index, bucket)

        def undo() -> None:
            sent.add_into(x)
            u[index] = before

        return undo

    def _left(self, index: Tensor, bucket: Bucket) -> Tensor:
        """What momentum is multiplied by at each of these positions."""
        slots = bucket.layout.slots
        starts = torch.tensor([slot.offset for slot in slots], device=index.device)
        sizes = torch.tensor([slot.numel for slot in slots], device=index.device)
        if kernels.ascending(index, bucket.layout.numel):  # one step per parameter, not per entry
            firsts = torch.searchsorted(index, starts)
            counts = firsts.diff(append=firsts.new_tensor([index.numel()]))
            which = None
        else:
            which = torch.searchsorted(starts, index, right=True) - 1
            counts = torch.bincount(which, minlength=len(slots))
        share = counts / sizes.clamp(min=1)
        if self.masking == "always":
            left = (share >= 1).to(share.dtype)
        else:
            fading = 1 - at(self.momentum, bucket.step) * (1 - share)
            left = share / fading.clamp(min=1e-12)
        return left.repeat_interleave(counts) if which is None else left[which]


def _rated(
    residual: Tensor, step: Tensor, bucket: Bucket, weight: float, rated: bool,
    scratch: Tensor | None = None,
) -> Sum:  # fmt: skip
    """What is added to the residual; times the learning rate, if that is to be inside."""
    if not rated or bucket.rates is None:
        return Sum(residual, step, weight, scratch=scratch)
    rates = [(slot, float(bucket.rates[slot.name])) for slot in bucket.layout.slots]
    if len({rate for _, rate in rates}) > 1:
        step = step.to(residual.dtype) if scratch is None else scratch.copy_(step)
        for slot, rate in rates:
            slot.view(step).mul_(rate)
        folded = Sum(residual, step, weight)
    else:
        folded = Sum(residual, step, rates[0][1] * weight, scratch=scratch)
    folded.units = [(slot, 1.0 / rate if rate else 0.0) for slot, rate in rates]
    return folded


def _gradient(bucket: Bucket) -> Tensor:
    assert isinstance(bucket.flat, Tensor), "a Remember inside a Remember would count twice"
    return bucket.flat


def _flat(bucket: Bucket, key: str, grad: Tensor) -> Tensor:
    like = grad.new_empty(0, dtype=working_dtype(grad.dtype))
    return bucket.scope("memory").flat(key, like)


def _cleaned(grad: Tensor, weight: float) -> bool:
    """Weighted in place, without entries that are not finite; whether there were none."""
    finite = kernels.finite(grad)
    if not finite:
        torch.nan_to_num_(grad, nan=0.0, posinf=0.0, neginf=0.0)
    if weight != 1.0:
        grad.mul_(weight)
    return finite


def _clipped(grad: Tensor, limit: float) -> None:
    norm = float(torch.linalg.vector_norm(grad, dtype=torch.float64))
    if norm > limit:
        grad.mul_(limit / norm)


def _checked_share(name: str, number: float) -> float:
    if isinstance(number, bool) or not isinstance(number, int | float) or not 0 <= number <= 1:
        raise ValueError(f"{name} must be in [0, 1], got {number!r}")
    return float(number)
