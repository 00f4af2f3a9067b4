"""Adding a gradient to what is held back, and finding what is large, in plain torch."""

from __future__ import annotations

import math
from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor

Memo = MutableMapping[str, Any]
HUGE = 1e30  # gradients below this cannot overflow a float32 residual in a lifetime of steps


def accumulate(residual: Tensor, grad: Tensor, /, alpha: float = 1.0, decay: float = 1.0) -> bool:
    """residual = decay * residual + alpha * grad, without gradient entries that are not finite.

    Returns whether all were finite. A sum that overflows is held at the largest number.
    """
    if grad.numel() == 0:
        return True
    if decay != 1.0:
        residual.mul_(decay)
    largest = _find_largest(grad) * alpha
    finite = math.isfinite(largest)
    usable = grad if finite else torch.nan_to_num(grad, nan=0.0, posinf=0.0, neginf=0.0)
    residual.add_(usable, alpha=alpha)
    if not largest < HUGE:
        torch.nan_to_num_(residual, nan=0.0)
    return finite


def finite(x: Tensor, /) -> bool:
    """Whether no entry is NaN or infinite, in one read."""
    return x.numel() == 0 or math.isfinite(_find_largest(x))


def _find_largest(x: Tensor) -> float:
    """The largest magnitude, in one read; NaN wins over everything."""
    low, high = torch.aminmax(x)  # ten times faster than a norm, on a CPU
    return float(torch.maximum(-low, high))


def add_topk(
    residual: Tensor, grad: Tensor, /, alpha: float, k: int, memo: Memo
) -> tuple[Tensor, bool]:  # (r, c), (r, c) -> (r * k,)
    """`accumulate` and `topk` of the result, in one sweep where there is a kernel for it."""
    finite = accumulate(residual, grad, alpha)
    return topk(residual, k, memo), finite


def topk(rows: Tensor, /, k: int, memo: Memo | None = None) -> Tensor:  # (r, c) -> (r * k,)
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
        return _break_ties(count_nan(size), count_nan(edge), k)
    start = torch.arange(r, device=rows.device)[:, None] * c
    return (found.indices.sort(dim=1).values + start).reshape(-1)


def count_nan(size: Tensor) -> Tensor:
    """Magnitudes in which NaN is infinite."""
    return torch.nan_to_num(size, nan=math.inf, posinf=math.inf)


def _break_ties(size: Tensor, edge: Tensor, k: int) -> Tensor:
    above, at_edge = size > edge, size == edge
    missing = k - above.sum(dim=1, keepdim=True)
    chosen = above | (at_edge & (at_edge.cumsum(dim=1) <= missing))
    return chosen.reshape(-1).nonzero().reshape(-1)


def above(x: Tensor, /, edge: float, most: int) -> tuple[Tensor, int]:  # (n,) -> (count,)
    """Where the magnitude is at least `edge`, and how often; NaN counts as infinite.

    Where there are more than `most`, only their number is of use.
    """
    found = (count_nan(x.abs()) >= edge).nonzero().reshape(-1)
    return found[:most], found.numel()
