"""What every kernel must compute, in plain torch: the specification and the fallback."""

from __future__ import annotations

import math

import torch
from torch import Tensor

HUGE = 1e30  # gradients below this cannot overflow a float32 residual in a lifetime of steps


def accumulate(residual: Tensor, grad: Tensor, alpha: float = 1.0) -> bool:
    """residual += alpha * grad, leaving out gradient entries that are not finite.

    Returns whether all were finite. A sum that overflows is held at the largest number.
    """
    if grad.numel() == 0:
        return True
    # The largest magnitude is the cheapest test: one read, and NaN wins over everything.
    largest = float(torch.linalg.vector_norm(grad, float("inf"))) * alpha
    finite = math.isfinite(largest)
    usable = grad if finite else torch.nan_to_num(grad, nan=0.0, posinf=0.0, neginf=0.0)
    residual.add_(usable, alpha=alpha)
    if not largest < HUGE:
        torch.nan_to_num_(residual, nan=0.0)
    return finite


def finite(x: Tensor) -> bool:
    """Whether no entry is NaN or infinite, in one read."""
    return x.numel() == 0 or bool(torch.linalg.vector_norm(x, float("inf")).isfinite())


def topk(rows: Tensor, k: int) -> Tensor:  # (r, c) -> (r * k,)
    """Flat indices, ascending, of the k entries of largest magnitude in every row.

    Ties go to the lower index; NaN counts as larger than everything, so that it is never hidden.
    """
    r, c = rows.shape
    if k >= c:
        return torch.arange(r * c, device=rows.device)
    size = rows.abs()
    found = size.topk(k, dim=1, sorted=True)
    edge = found.values[:, -1:]
    # Without ties at the edge torch has no choice left; counting them costs one pass.
    if int((size >= edge).sum()) != r * k:  # host sync: the tie rule must hold on every device
        size = torch.nan_to_num(size, nan=float("inf"))
        return _ties_by_index(size, torch.nan_to_num(edge, nan=float("inf")), k)
    start = torch.arange(r, device=rows.device)[:, None] * c
    return (found.indices.sort(dim=1).values + start).reshape(-1)


def _ties_by_index(size: Tensor, edge: Tensor, k: int) -> Tensor:
    above, at_edge = size > edge, size == edge
    missing = k - above.sum(dim=1, keepdim=True)
    chosen = above | (at_edge & (at_edge.cumsum(dim=1) <= missing))
    return chosen.reshape(-1).nonzero().reshape(-1)
