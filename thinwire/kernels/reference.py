"""What every kernel must compute, in plain torch: the specification and the fallback."""

from __future__ import annotations

import math
from collections.abc import MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

Memo = MutableMapping[str, Any]
Runs = Sequence[tuple[int, int]]  # stretches of a buffer, ascending: where each begins and ends

HUGE = 1e30  # gradients below this cannot overflow a float32 residual in a lifetime of steps


def accumulate(residual: Tensor, grad: Tensor, alpha: float = 1.0) -> bool:
    """residual += alpha * grad, leaving out gradient entries that are not finite.

    Returns whether all were finite. A sum that overflows is held at the largest number.
    """
    if grad.numel() == 0:
        return True
    largest = _largest(grad) * alpha
    finite = math.isfinite(largest)
    usable = grad if finite else torch.nan_to_num(grad, nan=0.0, posinf=0.0, neginf=0.0)
    residual.add_(usable, alpha=alpha)
    if not largest < HUGE:
        torch.nan_to_num_(residual, nan=0.0)
    return finite


def finite(x: Tensor) -> bool:
    """Whether no entry is NaN or infinite, in one read."""
    return x.numel() == 0 or math.isfinite(_largest(x))


def _largest(x: Tensor) -> float:
    """The largest magnitude, in one read; NaN wins over everything."""
    low, high = torch.aminmax(x)  # ten times faster than a norm, on a CPU
    return float(torch.maximum(-low, high))


def add_topk(
    residual: Tensor, grad: Tensor, alpha: float, k: int, memo: Memo
) -> tuple[Tensor, bool]:  # (r, c), (r, c) -> (r * k,)
    """`accumulate` and `topk` of the result, in one sweep where there is a kernel for it."""
    finite = accumulate(residual, grad, alpha)
    return topk(residual, k, memo), finite


def topk(rows: Tensor, k: int, memo: Memo | None = None) -> Tensor:  # (r, c) -> (r * k,)
    """Flat indices, ascending, of the k entries of largest magnitude in every row.

    Ties go to the lower index; NaN counts as infinite, so that it is never hidden. A kernel may
    keep a guess in `memo` for the next call with similar numbers; it changes nothing but the speed.
    """
    r, c = rows.shape
    if k >= c:
        return torch.arange(r * c, device=rows.device)
    size = rows.abs()
    found = size.topk(k, dim=1, sorted=True)
    edge = found.values[:, -1:]
    # Without ties at the edge torch has no choice left; counting them costs one pass.
    if int((size >= edge).sum()) != r * k:  # host sync: the tie rule must hold on every device
        return _ties_by_index(_counted(size), _counted(edge), k)
    start = torch.arange(r, device=rows.device)[:, None] * c
    return (found.indices.sort(dim=1).values + start).reshape(-1)


def _counted(size: Tensor) -> Tensor:
    """Magnitudes in which NaN is infinite."""
    return torch.nan_to_num(size, nan=math.inf, posinf=math.inf)


def _ties_by_index(size: Tensor, edge: Tensor, k: int) -> Tensor:
    above, at_edge = size > edge, size == edge
    missing = k - above.sum(dim=1, keepdim=True)
    chosen = above | (at_edge & (at_edge.cumsum(dim=1) <= missing))
    return chosen.reshape(-1).nonzero().reshape(-1)


def above(x: Tensor, edge: float, most: int) -> tuple[Tensor, int]:  # (n,) -> (count,)
    """Where the magnitude is at least `edge`, and how often; NaN counts as infinite.

    Where there are more than `most`, only their number is of use.
    """
    found = (_counted(x.abs()) >= edge).nonzero().reshape(-1)
    return found[:most], found.numel()


def gather(x: Tensor, indices: Tensor) -> Tensor:  # (n,), (k,) -> (k,)
    """The entries at these positions."""
    return x[indices]


def scatter_add(out: Tensor, indices: Tensor, values: Tensor, alpha: float = 1.0) -> Tensor:
    """out[indices] += alpha * values; an index that stands twice counts twice, in that order."""
    # index_add_ on the CPU runs in index order, so every rank rounds alike.
    return out.index_add_(0, indices, values.to(out.dtype), alpha=alpha)


def filled(out: Tensor, runs: Runs, indices: Tensor, values: Tensor, alpha: float) -> float:
    """out = 0 in the runs, then `scatter_add`; the indices lie in the runs.

    Returns a magnitude that no entry written exceeds, close to the largest; infinite for NaN.
    """
    for start, stop in runs:
        out[start:stop].zero_()
    scatter_add(out, indices, values, alpha)
    return peak(out[indices])


def peak(x: Tensor) -> float:
    """The largest magnitude, infinite if any entry is NaN; 0 of nothing."""
    return float(_counted(x.abs()).max()) if x.numel() else 0.0


def ascending(indices: Tensor, numel: int) -> bool:
    """Whether these positions ascend strictly, from 0 on, and stay below numel."""
    if indices.numel() == 0:
        return True
    inside = int(indices[0]) >= 0 and int(indices[-1]) < numel
    return inside and bool((indices.diff() > 0).all())


def member(indices: Tensor, others: Tensor) -> Tensor:  # (k,), (m,) -> (k,) bool
    """Which of the indices are among the others; both ascend."""
    return torch.isin(indices, others)


def compress(indices: Tensor, values: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """The entries of a payload whose flag is set."""
    return indices[kept], values[kept]


def merged(
    indices: Sequence[Tensor], values: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:  # (k,)... -> (m,)
    """The sum of payloads with ascending indices: one entry an index, ascending.

    Equal indices are added in the payloads' order.
    """
    every = torch.cat(list(values))
    index, place = torch.cat(list(indices)).unique(return_inverse=True)
    out = torch.zeros(index.numel(), dtype=every.dtype, device=every.device)
    return index, out.index_add_(0, place, every)
