"""The discrete cosine transform in chunks: where a slowly varying gradient is a few large numbers.

A parameter is seen as a matrix (outermost dimension in memory x the rest) and cut into chunks of
at most `chunk` x `chunk`, each side the largest divisor of its dimension; vectors into stretches.
The DCT-II of each chunk, orthonormal, is one row of coefficients. Peng, Quesnelle & Kingma 2024
(DeMo, arXiv 2411.19870).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from thinwire.layout import Layout, Slot
from thinwire.schedule import checked_whole


@dataclass(frozen=True)
class Dct:
    """Chunks of at most this many entries a side."""

    chunk: int = 64

    def __post_init__(self) -> None:
        checked_whole("chunk", self.chunk, 1, "the side of a chunk; 64 is the paper's")

    def layout(self, layout: Layout) -> Layout:
        """One row a chunk, at the same offsets."""
        return Layout(tuple(self._rows(slot) for slot in layout.slots), layout.numel)

    def forward(self, flat: Tensor, layout: Layout) -> Tensor:
        return _each(flat, layout, self._chunks)

    def back(self, coefficients: Tensor, layout: Layout) -> Tensor:
        return _each(coefficients, layout, self._join_chunks)

    def _chunks(self, values: Tensor, slot: Slot) -> Tensor:
        (n, m), (a, b) = slot.matrix, self._sides(slot)
        blocks = values.view(n // a, a, m // b, b).transpose(1, 2)  # (n/a, m/b, a, b)
        return cosines(a, values) @ blocks @ cosines(b, values).T

    def _join_chunks(self, coefficients: Tensor, slot: Slot) -> Tensor:
        (n, m), (a, b) = slot.matrix, self._sides(slot)
        blocks = coefficients.view(n // a, m // b, a, b)
        return (cosines(a, blocks).T @ blocks @ cosines(b, blocks)).transpose(1, 2)

    def _sides(self, slot: Slot) -> tuple[int, int]:
        n, m = slot.matrix
        return _divisor(n, self.chunk), _divisor(m, self.chunk)

    def _rows(self, slot: Slot) -> Slot:
        size = math.prod(self._sides(slot)) if slot.numel else 1
        return Slot(slot.name, slot.offset, (slot.numel // size, size), (size, 1))


def _each(flat: Tensor, layout: Layout, change: Callable[[Tensor, Slot], Tensor]) -> Tensor:
    """Every parameter changed, in a new buffer; zero where nobody of this layout lives."""
    out = torch.zeros_like(flat)
    for slot in layout.slots:
        if slot.numel:
            here = slice(slot.offset, slot.stop)
            out[here] = change(flat[here], slot).reshape(-1)
    return out


def cosines(n: int, like: Tensor) -> Tensor:  # (n, n)
    """The orthonormal DCT-II matrix: rows are frequencies."""
    return _cosines(n).to(like.device, like.dtype)


@lru_cache(maxsize=128)
def _cosines(n: int) -> Tensor:
    frequency = torch.arange(n, dtype=torch.float64)[:, None]
    place = torch.arange(n, dtype=torch.float64) + 0.5
    rows = torch.cos(math.pi / n * frequency * place) * math.sqrt(2 / n)
    rows[0] /= math.sqrt(2)
    return rows


@lru_cache(maxsize=1024)
def _divisor(n: int, most: int) -> int:
    """The largest divisor of n that is at most `most`."""
    return next(d for d in range(min(n, most), 0, -1) if n % d == 0) if n else 1
