"""Sparse sums, in Triton: in the order of the indices, so that all ranks round alike."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels.gpu.launch import launch
from thinwire.kernels.reference.sparse import Runs, find_peak


@triton.jit
def _scatter(out, indices, order, values, alpha, n, B: tl.constexpr):
    """Every first of equal indices adds up all of them, one after the other."""
    at = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    inside = at < n
    mine = tl.load(indices + at, mask=inside, other=-1)
    before = tl.load(indices + at - 1, mask=inside & (at > 0), other=-2)
    active = inside & (mine != before)
    total = tl.load(out + mine, mask=active, other=0.0)
    going = active
    j = at
    while tl.max(going.to(tl.int32)) > 0:
        source = tl.load(order + j, mask=going, other=0)
        total += tl.where(going, alpha * tl.load(values + source, mask=going, other=0.0), 0.0)
        j += 1
        going = going & (j < n) & (tl.load(indices + j, mask=going & (j < n), other=-1) == mine)
    tl.store(out + mine, total, mask=active)


def scatter_add(out: Tensor, indices: Tensor, values: Tensor, alpha: float = 1.0) -> Tensor:
    """Equal indices in their order, so that all ranks round alike."""
    index, order = indices.sort(stable=True)
    n = indices.numel()
    launch(_scatter, n, out, index, order, values.to(out.dtype), alpha, n)
    return out


def filled(out: Tensor, runs: Runs, indices: Tensor, values: Tensor, alpha: float) -> float:
    for start, stop in runs:
        out[start:stop].zero_()
    scatter_add(out, indices, values, alpha)
    return find_peak(out[indices])  # host sync: whether the step counts is decided with it


def merged(indices: Sequence[Tensor], values: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    every = torch.cat(list(values))
    index, place = torch.cat(list(indices)).unique(return_inverse=True)
    return index, scatter_add(every.new_zeros(index.numel()), place, every)
