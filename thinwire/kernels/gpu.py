"""The same kernels on a GPU, in Triton. Tested with TRITON_INTERPRET=1; not timed by us.

Each is one launch that reads its numbers once. What depends on the order in which blocks happen to
finish is put in order afterwards, so that every rank and every run gets the same bits. A row is
held by one program: its k-th largest magnitude is found by bisection of the bits of floats, which
needs no sorting and no host. Flat selection guesses an edge, as on the CPU.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels import reference
from thinwire.kernels.reference import Runs, ascending, compress, finite, gather, member

__all__ = [
    "above", "accumulate", "add_topk", "ascending", "compress", "filled", "finite", "gather",
    "member", "merged", "scatter_add", "topk",
]  # fmt: skip
Memo = MutableMapping[str, Any]
BLOCK = 1024
ROW = 16_384  # columns that one program can hold
BINS = 1 << 16  # of the count of magnitudes: their upper 16 bits
INFINITE = 0x7F800000
LARGEST = torch.finfo(torch.float32).max


@triton.jit
def _magnitude(x):
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.minimum(bits, 0x7F800000)  # NaN counts as infinite


@triton.jit
def _added(x, grad, alpha, largest):
    """The sum, and 1 where the gradient is not finite: left out; overflow is held."""
    step = alpha * grad
    total = x + step
    ugly = _magnitude(grad) >= 0x7F800000
    bad = ugly | (_magnitude(step) >= 0x7F800000)
    held = tl.where(step > 0, largest, -largest)
    total = tl.where(_magnitude(total) >= 0x7F800000, held, total)
    return tl.where(ugly, x, total), bad.to(tl.int32)


@triton.jit
def _sweep(
    x, grad, alpha, edge, n, found, room, counters, largest, FUSED: tl.constexpr, B: tl.constexpr
):
    """Add; append where the magnitude reaches the edge. counters: how many, and any not finite."""
    at = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    inside = at < n
    value = tl.load(x + at, mask=inside, other=0.0)
    if FUSED:
        step = tl.load(grad + at, mask=inside, other=0.0)
        value, bad = _added(value, step, alpha, largest)
        tl.store(x + at, value, mask=inside)
        if tl.sum(bad) > 0:
            tl.atomic_max(counters + 1, 1)
    passes = inside & (_magnitude(value) >= edge)
    each = passes.to(tl.int32)
    count = tl.sum(each)
    if count > 0:
        start = tl.atomic_add(counters, count)
        place = start + tl.cumsum(each, axis=0) - 1
        tl.store(found + place, at, mask=passes & (place < room))


@triton.jit
def _tally(x, n, counts, B: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    inside = at < n
    size = _magnitude(tl.load(x + at, mask=inside, other=0.0))
    tl.atomic_add(counts + (size >> 15), 1, mask=inside)


@triton.jit
def _rows(x, grad, alpha, c, k, out, flag, largest, FUSED: tl.constexpr, B: tl.constexpr):
    """One row: add, and the flat indices of its k largest, ascending."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, B)
    inside = column < c
    at = row * c + column
    value = tl.load(x + at, mask=inside, other=0.0)
    if FUSED:
        step = tl.load(grad + at, mask=inside, other=0.0)
        value, bad = _added(value, step, alpha, largest)
        tl.store(x + at, value, mask=inside)
        if tl.sum(tl.where(inside, bad, 0)) > 0:
            tl.atomic_max(flag, 1)
    size = tl.where(inside, _magnitude(value), -1)
    low = 0
    high = 0x7F800001  # k reach low, fewer reach high
    for _ in range(31):
        middle = low + (high - low) // 2
        enough = tl.sum((size >= middle).to(tl.int32)) >= k
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    above = (size > low).to(tl.int32)
    level = (size == low).to(tl.int32)
    chosen = above | (level * (tl.cumsum(level, axis=0) <= k - tl.sum(above)).to(tl.int32))
    place = row * k + tl.cumsum(chosen, axis=0) - 1
    tl.store(out + place, at, mask=chosen != 0)


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


def accumulate(residual: Tensor, grad: Tensor, alpha: float = 1.0) -> bool:
    """See `reference.accumulate`."""
    none = torch.empty(0, dtype=torch.int64, device=residual.device)
    return _swept(residual, grad, alpha, INFINITE + 1, none)[1]


def topk(rows: Tensor, k: int, memo: Memo | None = None) -> Tensor:
    """See `reference.topk`."""
    return _selected(rows, None, 1.0, k, {} if memo is None else memo)[0]


def add_topk(
    residual: Tensor, grad: Tensor, alpha: float, k: int, memo: Memo
) -> tuple[Tensor, bool]:
    """See `reference.add_topk`."""
    return _selected(residual, grad, alpha, k, memo)


def above(x: Tensor, edge: float, most: int) -> tuple[Tensor, int]:
    """See `reference.above`."""
    found = torch.empty(most, dtype=torch.int64, device=x.device)
    count, _ = _swept(x, None, 1.0, _key(edge), found)
    return found[:count].sort().values if count <= most else found, count


def scatter_add(out: Tensor, indices: Tensor, values: Tensor, alpha: float = 1.0) -> Tensor:
    """See `reference.scatter_add`: equal indices in their order, so that all ranks round alike."""
    ascending, order = indices.sort(stable=True)
    n = indices.numel()
    if n:
        _scatter[(triton.cdiv(n, BLOCK),)](
            out, ascending, order, values.to(out.dtype), alpha, n, B=BLOCK
        )
    return out


def filled(out: Tensor, runs: Runs, indices: Tensor, values: Tensor, alpha: float) -> float:
    """See `reference.filled`."""
    for start, stop in runs:
        out[start:stop].zero_()
    scatter_add(out, indices, values, alpha)
    return reference.peak(out[indices])  # host sync: whether the step counts is decided with it


def merged(indices: Sequence[Tensor], values: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """See `reference.merged`."""
    every = torch.cat(list(values))
    index, place = torch.cat(list(indices)).unique(return_inverse=True)
    return index, scatter_add(every.new_zeros(index.numel()), place, every)


def _selected(
    rows: Tensor, grad: Tensor | None, alpha: float, k: int, memo: Memo
) -> tuple[Tensor, bool]:
    r, c = rows.shape
    if k >= c:
        clean = grad is None or accumulate(rows.view(-1), grad.view(-1), alpha)
        return torch.arange(r * c, device=rows.device), clean
    if c <= ROW:
        out = torch.empty(r * k, dtype=torch.int64, device=rows.device)
        flag = torch.zeros(1, dtype=torch.int32, device=rows.device)
        _rows[(r,)](
            rows, rows if grad is None else grad, alpha, c, k, out, flag, LARGEST,
            FUSED=grad is not None, B=triton.next_power_of_2(c),
        )  # fmt: skip
        # host sync, where there is a gradient: a rank must know that it aborts before it sends
        return out, grad is None or not bool(flag)
    if r > 1:
        clean = grad is None or accumulate(rows.view(-1), grad.reshape(-1), alpha)
        return reference.topk(rows, k), clean
    return _flat(rows.view(-1), None if grad is None else grad.view(-1), alpha, k, memo)


def _flat(x: Tensor, grad: Tensor | None, alpha: float, k: int, memo: Memo) -> tuple[Tensor, bool]:
    found = torch.empty(3 * k + 4096, dtype=torch.int64, device=x.device)
    edge = _key(memo["guess"]) if "guess" in memo else INFINITE
    count, clean = _swept(x, grad, alpha, edge, found)
    if not k <= count <= found.numel():
        edge, count = _counted(x, k)
        found = torch.empty(count, dtype=torch.int64, device=x.device)
        _swept(x, None, alpha, edge, found)
    candidates = found[:count].sort().values  # blocks append in any order
    chosen = candidates[reference.topk(x[candidates][None], k)]
    # host sync: one number, a guess for the next step
    memo["guess"] = 0.97 * float(x[chosen].abs().min())
    return chosen, clean


def _swept(
    x: Tensor, grad: Tensor | None, alpha: float, edge: int, found: Tensor
) -> tuple[int, bool]:
    counters = torch.zeros(2, dtype=torch.int32, device=x.device)
    n = x.numel()
    if n:
        _sweep[(triton.cdiv(n, BLOCK),)](
            x, x if grad is None else grad, alpha, edge, n, found, found.numel(), counters, LARGEST,
            FUSED=grad is not None, B=BLOCK,
        )  # fmt: skip
    count, bad = counters.tolist()  # host sync: whether the guess was good decides what comes next
    return count, bad == 0


def _counted(x: Tensor, k: int) -> tuple[int, int]:
    """An edge that at least k entries reach, and how many do."""
    counts = torch.zeros(BINS, dtype=torch.int32, device=x.device)
    _tally[(triton.cdiv(x.numel(), BLOCK),)](x, x.numel(), counts, B=BLOCK)
    reached = counts.flip(0).cumsum(0)
    place = int(torch.searchsorted(reached, k))
    return (BINS - 1 - place) << 15, int(reached[place])


def _key(edge: float) -> int:
    return int(torch.tensor(max(edge, 0.0), dtype=torch.float32).view(torch.int32))
