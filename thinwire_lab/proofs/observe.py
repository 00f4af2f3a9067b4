"""An observer inside a recipe: it reads what goes in and what was sent, and changes nothing.

It sits where the residual has been added, so that x is the gradient plus what was held back. Every
`every` steps it looks at two steps in a row: the second one shows what became of the first one's
residual. What it sends for itself is not counted.

Selections have a bound of theory, 1 - k/n; of what leaves no entries out (low rank, few bits, other
bases) the papers ask that it is no worse than sending nothing, and the residual's limit is taken
from the worst contraction seen.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from thinwire.bucket import Bucket
from thinwire.combinators import memories
from thinwire.comm.metered import unmetered
from thinwire.describe import rebuilt
from thinwire.layout import Layout, Slot
from thinwire.operand import Sum
from thinwire.payload import find_chosen
from thinwire.protocols import Comm, Reduced, Reducer, Traffic
from thinwire.remember import Remember

TINY = 1e-30
EXACT = 1e-9  # contractions below are rounding
WHOLE = 0.9  # share from which nothing is said to be left out


@dataclass(frozen=True, kw_only=True)
class Note:
    """What was seen of one parameter in one step. NaN stands for what could not be asked."""

    step: int
    name: str
    numel: int
    rows: int
    density: float  # entries this rank chose and that arrived, of all
    share: float  # the same of all ranks, of entries that were not zero; 1 if nobody chooses
    mass: float  # |mean - average of sent| / |mean x|: the law
    lost: float  # (left - what came back) . x / |x|^2, of the step before
    strange: float  # |what came back that was not left| / |what was left|
    contraction: float  # |x - sent|^2 / |x|^2, mean over ranks
    bound: float  # 1 - k/n, likewise; 1 where nothing is left out
    xi: float  # |C(mean x) - mean| / |mean gradient|
    delta: float  # |mean x - mean|^2 / ((1 - k/n) |mean x|^2), k of the mean
    residual: float  # |x - sent| over the largest |gradient| so far, beside its limit: worst rank
    limit: float  # 2 sqrt(1 - d) / d of that rank, d = the least k/n, or 1 - contraction, so far
    missing: float  # rows of which no rank sent anything, of those with something to send
    overlap: float  # how much of the union a rank has in common with each other one

    @property
    def sparse(self) -> bool:
        """Whether entries are left out."""
        return self.share < WHOLE


@dataclass
class Observer:
    """Collects notes; one a rank, all ranks alike."""

    every: int = 10
    notes: list[Note] = field(default_factory=list)
    before: dict[str, tuple[int, Tensor, Tensor]] = field(default_factory=dict)  # step, x, left
    largest: dict[str, float] = field(default_factory=dict)  # |gradient| of every parameter
    loosest: dict[str, float] = field(default_factory=dict)  # what of it was lost at most

    def due(self, step: int) -> bool:
        return step % self.every < 2

    def hear(self, layout: Layout, grad: Tensor) -> None:
        """Of every step, seen or not."""
        for slot in layout.slots:
            size = _norm(_cut(slot, grad))
            if math.isfinite(size):
                self.largest[slot.name] = max(self.largest.get(slot.name, 0.0), size)

    def see(
        self, layout: Layout, step: int, grad: Tensor, x: Tensor, alone: Tensor, reduced: Reduced,
        comm: Comm,
    ) -> None:  # fmt: skip
        if not reduced.finite:  # it will be taken again, with this gradient in the residual too
            for slot in layout.slots:
                self.before.pop(slot.name, None)
            return
        sent = reduced.sent.add_into(torch.zeros_like(x), 1.0)
        picked = find_chosen(reduced.sent)
        picks = (sent != 0).to(x.dtype) if picked is None else _picks(picked, x, reduced.mean)
        for slot in layout.slots:
            if slot.numel:
                parts = tuple(_cut(slot, y) for y in (grad, x, sent, picks, reduced.mean, alone))
                self.notes.append(self._note(step, slot, parts, picked is not None, comm))

    def _note(
        self, step: int, slot: Slot, parts: tuple[Tensor, ...], selects: bool, comm: Comm
    ) -> Note:
        grad, x, sent, picks, mean, alone = parts
        n, p, rows = slot.numel, comm.size, slot.matrix[0]
        mine, there = int(picks.sum()), int((x != 0).sum())
        of_all = comm.all_reduce(torch.tensor([mine, there], dtype=torch.float64))
        # what is rounded to nothing was not left out: rounding has levels, and zero may be one
        share = float(of_all[0] / max(1.0, float(of_all[1]))) if selects else 1.0
        votes = comm.all_reduce(picks.clone())
        union = int((votes > 0).sum())
        mean_x, mean_sent = _mean(x, comm), _mean(sent, comm)
        left = x - sent
        ratio = _square(left) / max(_square(x), TINY)
        bound = 1 - mine / max(1, there) if share < WHOLE else 1.0
        contraction = _mean(torch.tensor([ratio, bound]), comm)
        kept = int((mean != 0).sum())
        lost, strange = self._came_back(step, slot, x - grad)
        residual = _worst(torch.tensor(self._residual(slot, left, ratio, bound)), comm)
        self.before[slot.name] = (step, x, left)
        return Note(
            step=step, name=slot.name, numel=n, rows=rows, density=mine / n, share=share,
            mass=_norm(mean - mean_sent) / max(_norm(mean_x), TINY),
            lost=lost, strange=strange,
            contraction=float(contraction[0]), bound=float(contraction[1]),
            xi=_norm(alone - mean) / max(_norm(_mean(grad, comm)), TINY),
            delta=_square(mean_x - mean) / max((1 - kept / n) * _square(mean_x), TINY)
            if kept < n else float("nan"),
            residual=float(residual[1]), limit=float(residual[2]),
            missing=_missing(votes.view(rows, -1), comm.all_reduce(x.abs()).view(rows, -1)),
            overlap=(float(votes.sum()) - union) / ((p - 1) * union) if p > 1 and union else 1.0,
        )  # fmt: skip

    def _residual(self, slot: Slot, left: Tensor, ratio: float, bound: float) -> list[float]:
        """How near it is to its limit, its size, and the limit (Karimireddy et al. 2019)."""
        lost = max(self.loosest.get(slot.name, 0.0), bound if bound < 1 else ratio)
        self.loosest[slot.name] = lost  # the residual is of all steps, and so is its limit
        size = _norm(left) / max(self.largest[slot.name], TINY)
        if lost < EXACT:
            return [0.0, size, 0.0]
        limit = 2 * math.sqrt(lost) / (1 - lost) if lost < 1 else math.inf
        return [size / limit, size, limit]

    def _came_back(self, step: int, slot: Slot, added: Tensor) -> tuple[float, float]:
        """How much of x did not come back of what was left of it, and how much else came.

        Not a number if that was not seen, or was mere rounding.
        """
        before, x, left = self.before.get(slot.name, (-9, added, added))
        if before != step - 1 or _norm(left) <= 1e-4 * _norm(x):
            return math.nan, math.nan
        kept = _dot(added, left) / _square(left)
        return _dot(left - added, x) / _square(x), _norm(added - kept * left) / _norm(left)


@dataclass(frozen=True)
class Observed:
    """A reducer under observation."""

    inner: Reducer
    observer: Any

    def reduce(self, bucket: Bucket, comm: Comm) -> Reduced:
        # as it was added: with a loss scale or a learning rate the memory has units of its own
        flat = bucket.flat
        grad = flat.alpha * flat.grad.to(flat.residual.dtype) if isinstance(flat, Sum) else flat
        self.observer.hear(bucket.layout, grad)
        if not self.observer.due(bucket.step):
            return self.inner.reduce(bucket, comm)
        grad, x, quiet = grad.clone(), bucket.take().clone(), unmetered(comm)
        alone = self._of_mean(x, bucket, quiet)
        reduced = self.inner.reduce(bucket, comm)
        self.observer.see(bucket.layout, bucket.step, grad, x, alone, reduced, quiet)
        return reduced

    def _of_mean(self, x: Tensor, bucket: Bucket, comm: Comm) -> Tensor:
        """C(mean x): what the compressor, with all it remembers, makes of the average.

        Every rank puts the average in; what the parts would remember of it goes to a draft.
        """
        reduced = self.inner.reduce(replace(bucket, flat=_mean(x, comm), draft={}), comm)
        return reduced.mean.clone()

    def traffic(self, layout: Layout, world: int, step: int = 0) -> Traffic:
        return self.inner.traffic(layout, world, step)


def observed(recipe: Any, observer: Observer) -> Any:
    """The recipe with the observer inside every memory, or around it where there is none."""

    def change(part: Any) -> Any:
        if isinstance(part, Remember):
            return replace(part, inner=Observed(part.inner, observer))
        return part

    return rebuilt(recipe, change) if memories(recipe) else Observed(recipe, observer)


def _picks(picked: Tensor, x: Tensor, mean: Tensor) -> Tensor:
    """1 where this rank chose an entry that arrived.

    What an owner of a region answers for is no choice of its own, and much of what owners choose
    in their own region they drop.
    """
    picks = torch.zeros_like(x)
    picks[picked] = 1
    return picks * (x != 0) * (mean != 0)


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


def _dot(x: Tensor, y: Tensor) -> float:
    return float((x.double() * y.double()).sum())


def _square(x: Tensor) -> float:
    return _dot(x, x)


def _norm(x: Tensor) -> float:
    return math.sqrt(_square(x))
