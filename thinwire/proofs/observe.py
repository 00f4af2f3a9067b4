"""An observer inside a recipe: it reads what goes in and what was sent, and changes nothing.

It sits where the residual has been added, so that x is the gradient plus what was held back. Every
`every` steps it looks at two steps in a row: the second one shows what became of the first one's
residual. What it sends for itself is not counted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from thinwire.bucket import Bucket
from thinwire.combinators import Scheduled, Watch
from thinwire.comm import local
from thinwire.layout import Layout, Slot
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
    carried: float  # |x - grad - what was left| / |what was left|, of the step before
    contraction: float  # |x - sent|^2 / |x|^2, of the worst rank
    bound: float  # 1 - k/n, of that rank
    xi: float  # |C(mean x) - mean| / |mean gradient|
    delta: float  # |mean x - mean|^2 / ((1 - k/n) |mean x|^2), k of the mean
    residual: float  # |x - sent| / |gradient|, of the worst rank
    missing: float  # rows of which no rank sent anything, of those with something to send
    overlap: float  # how much of the union a rank has in common with each other one


@dataclass
class Observer:
    """Collects notes; one a rank, all ranks alike."""

    every: int = 10
    notes: list[Note] = field(default_factory=list)
    left: dict[str, tuple[int, Tensor]] = field(default_factory=dict)

    def due(self, step: int) -> bool:
        return step % self.every < 2

    def see(
        self, layout: Layout, step: int, inner: Reducer,
        grad: Tensor, x: Tensor, reduced: Reduced, comm: Comm,
    ) -> None:  # fmt: skip
        if not reduced.finite:
            return
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
        n, p = slot.numel, comm.size
        mine = int((sent != 0).sum())
        votes = comm.all_reduce((sent != 0).float())
        union = int((votes > 0).sum())
        mean_x, mean_sent = _mean(x, comm), _mean(sent, comm)
        left = x - sent
        ratio, bound = _square(left) / max(_square(x), TINY), 1 - mine / n
        worst = _worst(torch.tensor([ratio - bound, ratio, bound]), comm)
        kept = int((mean != 0).sum())
        rows = slot.matrix[0]
        note = Note(
            step=step, name=slot.name, numel=n, rows=rows, density=mine / n,
            mass=_norm(mean - mean_sent) / max(_norm(mean), TINY),
            carried=self._carried(step, slot, x - grad),
            contraction=float(worst[1]), bound=float(worst[2]),
            xi=_norm(alone - mean) / max(_norm(_mean(grad, comm)), TINY),
            delta=_square(mean_x - mean) / max((1 - kept / n) * _square(mean_x), TINY)
            if kept < n else float("nan"),
            residual=float(_worst(torch.tensor([_norm(left) / max(_norm(grad), TINY)]), comm)[0]),
            missing=_missing(votes.view(rows, -1), comm.all_reduce(x.abs()).view(rows, -1)),
            overlap=(float(votes.sum()) - union) / ((p - 1) * union) if p > 1 and union else 1.0,
        )  # fmt: skip
        self.left[slot.name] = (step, left)
        return note

    def _carried(self, step: int, slot: Slot, added: Tensor) -> float:
        """How far what came back is from what was left; NaN if that was not seen, or was nothing.

        With momentum more than that comes back; then only its share along what was left is asked.
        """
        before, left = self.left.get(slot.name, (-9, added))
        size = _square(left)
        if before != step - 1 or size == 0:
            return float("nan")
        exact = math.sqrt(_square(added - left) / size)
        return min(exact, abs(1 - float((added * left).double().sum()) / size))


@dataclass(frozen=True)
class Observed:
    """A reducer under observation."""

    inner: Reducer
    observer: Any

    def reduce(self, bucket: Bucket, comm: Comm) -> Reduced:
        if not self.observer.due(bucket.step):
            return self.inner.reduce(bucket, comm)
        probe = partial(self.observer.see, bucket.layout, bucket.step, self.inner)
        return Watch(inner=self.inner, probe=probe).reduce(bucket, comm)

    def traffic(self, layout: Layout, world: int, step: int = 0) -> Traffic:
        return self.inner.traffic(layout, world, step)


def observed(recipe: Any, observer: Observer) -> Any:
    """The recipe with the observer inside every memory, or around it where there is none."""
    found = _inside(recipe, observer)
    return Observed(recipe, observer) if found is recipe else found


def _inside(part: Any, observer: Observer) -> Any:
    if isinstance(part, Remember):
        return replace(part, inner=Observed(part.inner, observer))
    if isinstance(part, Scheduled):
        raise ValueError(
            "a recipe whose other numbers are schedules cannot be observed; give plain numbers "
            "(a density may be a schedule)"
        )
    if not is_dataclass(part) or isinstance(part, type):
        return part
    changed = {}
    for each in fields(part):
        old = getattr(part, each.name)
        new = _inside(old, observer)
        if new is not old:
            changed[each.name] = new
    return replace(part, **changed) if changed else part


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
