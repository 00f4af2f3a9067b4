"""Low rank: every matrix as p q^T, one factor fixed and agreed, the other averaged.

One pass multiplies the matrix with an orthonormal basis of one side and averages the result, which
(orthonormalised) is the basis of the other side in the next pass:

    side P:  q <- orth(q);  p = M q;    average p;   sent = (my p) q^T;    mean = (mean p) q^T
    side Q:  p <- orth(p);  q = M^T p;  average q;   sent = p (my q)^T;    mean = p (mean q)^T

Two passes a step are PowerSGD (Vogels et al. 2019, arXiv 1905.13727), one pass is ACP-SGD (Zhang
et al. 2023, arXiv 2306.08881). Feedback is local (x - my own projection), which keeps every
rank's residual bounded. Vectors, and matrices that would not shrink, ride dense in the buffer of
the last pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire import kernels, payload
from thinwire.bucket import Bucket
from thinwire.layout import Layout, Slot, shared_seed
from thinwire.operand import working_dtype
from thinwire.payload import Dense, Parts, Payload
from thinwire.protocols import Pass

P, Q = 0, 1  # which factor is being averaged


@dataclass(frozen=True)
class _Factor:
    """One matrix in one pass: which side is averaged, and the orthonormal basis of the other."""

    slot: Slot
    side: int
    basis: Tensor  # (m, r) on side P, (n, r) on side Q

    @property
    def safety(self) -> float:
        """A power of two that keeps the product of a finite matrix and the basis finite."""
        return 2.0 ** -math.ceil(math.log2(self.basis.shape[0]) / 2)

    @property
    def shape(self) -> tuple[int, int]:
        n, m = self.slot.matrix
        return (n if self.side == P else m, self.basis.shape[1])

    def project(self, x: Tensor) -> Tensor:
        matrix = x[self.slot.offset : self.slot.offset + self.slot.numel].view(self.slot.matrix)
        project = kernels.project if self.side == P else kernels.project_back
        return project(matrix, self.basis * self.safety)

    def lift(self, factor: Tensor, entries: int) -> payload.LowRank:
        factor = factor.view(self.shape)
        basis = self.basis / self.safety
        p, q = (factor, basis) if self.side == P else (basis, factor)
        return payload.LowRank(p, q, entries)


@dataclass(frozen=True, kw_only=True)
class LowRank:
    """`rank` columns a matrix; `rounds` 1 is ACP-SGD, 2 is PowerSGD.

    A matrix is factored if its factors, times `min_saving`, are smaller than itself. A rank that
    changes with the step keeps the columns it has learnt.
    """

    rank: int | Callable[[int], float] = 4
    rounds: int = 1
    min_saving: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not callable(self.rank):
            _check_rank(self.rank)
        if not self.min_saving >= 0:
            raise ValueError(
                f"min_saving must not be negative, got {self.min_saving!r}; 1.0 is the default"
            )

    def passes(self, bucket: Bucket) -> Iterator[Pass]:
        x = bucket.take()
        x = x.to(working_dtype(x.dtype))
        scope = bucket.scope("frame")
        rank = self._rank_at(bucket.step)
        factored = [slot for slot in bucket.layout.slots if self._shrinks(slot, rank)]
        riders = [slot for slot in bucket.layout.slots if slot.numel and slot not in factored]
        for number in range(self.rounds):
            last = number == self.rounds - 1
            if not (factored or last):
                continue
            factors = [self._factor(slot, scope.of(slot), x, rank) for slot in factored]
            yield self._pass(x, factors, riders if last else [], scope)

    def sizes(self, layout: Layout, step: int) -> list[list[int]]:
        rank = self._rank_at(step)
        matrices = [slot for slot in layout.slots if self._shrinks(slot, rank)]
        riders = [slot.numel for slot in layout.slots if slot not in matrices]
        by_side = [[s.matrix[side] * _columns(s, rank) for s in matrices] for side in (P, Q)]
        if self.rounds == 1:
            return [by_side[step % 2] + riders]
        return ([by_side[P]] if matrices else []) + [by_side[Q] + riders]

    def _pass(self, x: Tensor, factors: list[_Factor], riders: list[Slot], scope: Any) -> Pass:
        parts = [factor.project(x).reshape(-1) for factor in factors]
        parts += [x[slot.offset : slot.offset + slot.numel] for slot in riders]
        widths = [part.numel() for part in parts]

        def lift(coefficients: Tensor) -> Payload:
            pieces = coefficients.split(widths)
            items: list[tuple[int, Payload]] = []
            for factor, piece in zip(factors, pieces, strict=False):
                entries = piece.numel() + (factor.basis.numel() if self.rounds > 1 else 0)
                items.append((factor.slot.offset, factor.lift(piece, entries)))
            for slot, piece in zip(riders, pieces[len(factors) :], strict=True):
                items.append((slot.offset, Dense(piece)))
            return Parts(tuple(items), x.numel())

        def learn(mean: Tensor) -> None:
            for factor, piece in zip(factors, mean.split(widths), strict=False):
                if bool(piece.any()):  # a vanished gradient teaches nothing: keep the basis
                    state = scope.of(factor.slot)
                    state["side"] = 1 - factor.side
                    state["basis"] = piece.reshape(factor.shape).clone()

        together = torch.cat([x[:0], *parts])
        return Pass(coefficients=together, sizes=widths, lift=lift, learn=learn)

    def _factor(self, slot: Slot, state: dict[str, Any], x: Tensor, rank: int) -> _Factor:
        side = int(state.get("side", P))
        rows, r = slot.matrix[1 - side], _columns(slot, rank)
        learnt = state.get("basis")
        if learnt is None or learnt.shape[0] != rows:
            learnt = x.new_empty(rows, 0)
        if learnt.shape[1] < r:
            draw = torch.Generator().manual_seed(shared_seed(self.seed, side, slot.name))
            drawn = torch.randn(rows, r, generator=draw)[:, learnt.shape[1] :]
            learnt = torch.cat([learnt, drawn.to(learnt.device, learnt.dtype)], dim=1)
        return _Factor(slot, side, orthonormal(learnt[:, :r].to(x.device, x.dtype)))

    def _rank_at(self, step: int) -> int:
        return _check_rank(self.rank(step)) if callable(self.rank) else self.rank

    def _shrinks(self, slot: Slot, rank: int) -> bool:
        n, m = slot.matrix
        if len(slot.shape) < 2 or slot.numel == 0:
            return False
        sent = _columns(slot, rank) * (n + m) / (2 if self.rounds == 1 else 1)
        return sent * self.min_saving < slot.numel


def _columns(slot: Slot, rank: int) -> int:
    return min(rank, *slot.matrix)


def _check_rank(rank: float) -> int:
    number = isinstance(rank, int | float) and not isinstance(rank, bool)
    if not number or not rank >= 1 or rank != int(rank):
        raise ValueError(
            f"rank must be a whole number of at least 1, got {rank!r}; 4 is the default"
        )
    return int(rank)


def orthonormal(basis: Tensor) -> Tensor:  # (n, r) -> (n, r)
    """Orthonormal columns that span these, for huge, tiny, rank-deficient and zero columns too."""
    largest = basis.abs().max()
    q: Tensor = torch.linalg.qr(basis / torch.where(largest > 0, largest, 1.0)).Q
    return q
