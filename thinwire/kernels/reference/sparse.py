"""Sparse sums and lists of positions, in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.kernels.reference.select import count_nan

Runs = Sequence[tuple[int, int]]  # stretches of a buffer, ascending: where each begins and ends


def gather(x: Tensor, /, indices: Tensor) -> Tensor:  # (n,), (k,) -> (k,)
    """The entries at these positions."""
    return x[indices]


def scatter_add(out: Tensor, indices: Tensor, values: Tensor, /, alpha: float = 1.0) -> Tensor:
    """out[indices] += alpha * values; an index that stands twice counts twice, in that order."""
    # index_add_ on the CPU runs in index order, so every rank rounds alike.
    return out.index_add_(0, indices, values.to(out.dtype), alpha=alpha)


def filled(out: Tensor, runs: Runs, indices: Tensor, values: Tensor, /, alpha: float) -> float:
    """out = 0 in the runs, then `scatter_add`; the indices lie in the runs.

    Returns a magnitude that no entry written exceeds, close to the largest; infinite for NaN.
    """
    for start, stop in runs:
        out[start:stop].zero_()
    scatter_add(out, indices, values, alpha)
    return find_peak(out[indices])


def find_peak(x: Tensor) -> float:
    """The largest magnitude, infinite if any entry is NaN; 0 of nothing."""
    return float(count_nan(x.abs()).max()) if x.numel() else 0.0


def ascending(indices: Tensor, /, numel: int) -> bool:
    """Whether these positions ascend strictly, from 0 on, and stay below numel."""
    if indices.numel() == 0:
        return True
    inside = int(indices[0]) >= 0 and int(indices[-1]) < numel
    return inside and bool((indices.diff() > 0).all())


def member(indices: Tensor, /, others: Tensor) -> Tensor:  # (k,), (m,) -> (k,) bool
    """Which of the indices are among the others; both ascend."""
    return torch.isin(indices, others)


def compress(indices: Tensor, values: Tensor, /, kept: Tensor) -> tuple[Tensor, Tensor]:
    """The entries of a payload whose flag is set."""
    return indices[kept], values[kept]


def merged(
    indices: Sequence[Tensor], values: Sequence[Tensor], /
) -> tuple[Tensor, Tensor]:  # (k,)... -> (m,)
    """The sum of payloads with ascending indices: one entry an index, ascending.

    Equal indices are added in the payloads' order.
    """
    every = torch.cat(list(values))
    index, place = torch.cat(list(indices)).unique(return_inverse=True)
    out = torch.zeros(index.numel(), dtype=every.dtype, device=every.device)
    return index, out.index_add_(0, place, every)
