"""An observer inside a recipe: it reads what goes in and what was sent, and changes nothing.

It sits where the residual has been added, so that x is the gradient plus what was held back. Every
`every` steps it looks at two steps in a row: the second one shows what became of the first one's
residual. What it sends for itself is not counted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from thinwire.bucket import Bucket
from thinwire.combinators import Scheduled, Watch
from thinwire.comm import local
from thinwire.describe import rebuilt
from thinwire.layout import Layout, Slot
from thinwire.operand import Sum
from thinwire.protocols import Comm, Reduced, Reducer, Traffic
from thinwire.remember import Remember

TINY = 1e-30


@dataclass(frozen=True, kw_only=True)
class Note:
    """What was seen of one parameter in one step. NaN stands for what could not be asked."""

    step: int
    name: str
    numel: int
    rows: int
    density: float  # entries this rank sent, of all
    mass: float  # |mean - average of sent| / |mean|: the law
    kept: float  # what came back of what the step before had left, as a factor: 1, or its decay
    carried: float  # |what came back - kept * what was left| / |what was left|
    contraction: float  # |x - sent|^2 / |x|^2, mean over ranks
    bound: float  # 1 - k/n, likewise
    xi: float  # |C(mean x) - mean| / |mean gradient|
    delta: float  # |mean x - mean|^2 / ((1 - k/n) |mean x|^2), k of the mean
    residual: float  # |x - sent| over the largest |gradient| so far, beside its limit: worst rank
    limit: float  # 2 sqrt(1 - d) / d of that rank, d = k/n
    missing: float  # rows of which no rank sent anything, of those with something to send
    overlap: float  # how much of the union a rank has in common with each other one


@dataclass
class Observer:
    """Collects notes; one a rank, all ranks alike."""

    every: int = 10
    notes: list[Note] = field(default_factory=list)
    left: dict[str, tuple[int, Tensor]] = field(default_factory=dict)
    largest: dict[str, float] = field(default_factory=dict)  # |gradient| of every parameter

    def due(self, step: int) -> bool:
        return step % self.every < 2

    def see(
        self, layout: Layout, step: int, inner: Reducer, alpha: float,
        grad: Tensor, x: Tensor, reduced: Reduced, comm: Comm,
    ) -> None:  # fmt: skip
        if not reduced.finite:
            return
        grad = alpha * grad.to(x.dtype)
        sent = reduced.sent.add_into(torch.zeros_like(x), 1.0)
        alone = _alone(layout, step, inner, _mean(x, comm))
        for slot in layout.slots:
            if slot.numel:
                cut = partial(_cut, slot)
                self.notes.append(self._note(
                    step, slot, cut(grad), cut(x), cut(sent), cut(reduced.mean), cut(alone), comm
                ))  # fmt: skip

    def _note(
        self, step: int, slot: Slot, grad: Tensor, x: Tensor, sent: Tensor, mean: Tensor,
        alone: Tensor, comm: Comm,
    ) -> Note:  # fmt: skip
        n, p, rows = slot.numel, comm.size, slot.matrix[0]
        mine = int((sent != 0).sum())
        votes = comm.all_reduce((sent != 0).float())
        union = int((votes > 0).sum())
        mean_x, mean_sent = _mean(x, comm), _mean(sent, comm)
        left = x - sent
        ratio, bound = _square(left) / max(_square(x), TINY), 1 - mine / n
        contraction = _mean(torch.tensor([ratio, bound]), comm)
        kept = int((mean != 0).sum())
        came_back = self._carried(step, slot, x - grad, _norm(x))
        residual = _worst(torch.tensor(self._residual(slot, grad, left, mine / n)), comm)
        self.left[slot.name] = (step, left)
        return Note(
            step=step, name=slot.name, numel=n, rows=rows, density=mine / n,
            mass=_norm(mean - mean_sent) / max(_norm(mean), TINY),
            kept=came_back[0], carried=came_back[1],
            contraction=float(contraction[0]), bound=float(contraction[1]),
            xi=_norm(alone - mean) / max(_norm(_mean(grad, comm)), TINY),
            delta=_square(mean_x - mean) / max((1 - kept / n) * _square(mean_x), TINY)
            if kept < n else float("nan"),
            residual=float(residual[1]), limit=float(residual[2]),
            missing=_missing(votes.view(rows, -1), comm.all_reduce(x.abs()).view(rows, -1)),
            overlap=(float(votes.sum()) - union) / ((p - 1) * union) if p > 1 and union else 1.0,
        )  # fmt: skip

    def _residual(self, slot: Slot, grad: Tensor, left: Tensor, density: float) -> list[float]:
        """How near it is to its limit, its size, and the limit (Karimireddy et al. 2019)."""
        self.largest[slot.name] = max(self.largest.get(slot.name, 0.0), _norm(grad))
        size = _norm(left) / max(self.largest[slot.name], TINY)
        limit = 2 * math.sqrt(1 - density) / density if density else math.inf
        return [size / limit if limit else 0.0, size, limit]

    def _carried(self, step: int, slot: Slot, added: Tensor, size: float) -> tuple[float, float]:
        """Which part of what was left came back, and how far the rest of what came is from it.

        Not a number if that was not seen, or was mere rounding.
        """
        before, left = self.left.get(slot.name, (-9, added))
        if before != step - 1 or _norm(left) <= 1e-4 * size:
            return math.nan, math.nan
        kept = float((added.double() * left.double()).sum()) / _square(left)
        return kept, _norm(added - kept * left) / _norm(left)


@dataclass(frozen=True)
class Observed:
    """A reducer under observation."""

    inner: Reducer
    observer: Any

    def reduce(self, bucket: Bucket, comm: Comm) -> Reduced:
        if not self.observer.due(bucket.step):
            return self.inner.reduce(bucket, comm)
        # as it was added: with a loss scale or a learning rate the memory has units of its own
        alpha = bucket.flat.alpha if isinstance(bucket.flat, Sum) else 1.0
        probe = partial(self.observer.see, bucket.layout, bucket.step, self.inner, alpha)
        return Watch(inner=self.inner, probe=probe).reduce(bucket, comm)

    def traffic(self, layout: Layout, world: int, step: int = 0) -> Traffic:
        return self.inner.traffic(layout, world, step)


def observed(recipe: Any, observer: Observer) -> Any:
    """The recipe with the observer inside every memory, or around it where there is none."""

    def change(part: Any) -> Any:
        if isinstance(part, Scheduled):
            raise ValueError(
                "a recipe whose other numbers are schedules cannot be observed; give plain numbers "
                "(a density may be a schedule)"
            )
        if isinstance(part, Remember):
            return replace(part, inner=Observed(part.inner, observer))
        return part

    found = rebuilt(recipe, change)
    return Observed(recipe, observer) if found is recipe else found


def _alone(layout: Layout, step: int, inner: Reducer, mean_x: Tensor) -> Tensor:
    """C(mean x): what the compressor makes of the average, in its native shape, on one rank."""
    bucket = Bucket(flat=mean_x.clone(), layout=layout, state={}, step=step)
    reduced = local.run(1, lambda comm: inner.reduce(bucket, comm))[0]
    alone: Tensor = reduced.mean
    return alone


def _cut(slot: Slot, flat: Tensor) -> Tensor:
    return flat[slot.offset : slot.offset + slot.numel]


def _mean(x: Tensor, comm: Comm) -> Tensor:
    return comm.all_reduce(x.clone()) / comm.size


def _worst(row: Tensor, comm: Comm) -> Tensor:
    """The row whose first number is the largest of all ranks."""
    rows = torch.stack(comm.all_gather(row))
    return rows[rows[:, 0].argmax()]


def _missing(votes: Tensor, sizes: Tensor) -> float:
    there = sizes.sum(dim=1) > 0
    silent = there & (votes.sum(dim=1) == 0)
    return float(silent.sum()) / max(1, int(there.sum()))


def _square(x: Tensor) -> float:
    return float(x.double().square().sum())


def _norm(x: Tensor) -> float:
    return math.sqrt(_square(x))
