"""Adding and selecting, in Triton: each kernel is one launch that reads its numbers once.

What depends on the order in which programs happen to finish is put in order afterwards, so that
every rank and every run gets the same bits. A row is held by one program: its k-th largest
magnitude is found by bisection of the bits of floats, which needs no sorting and no host. Flat
selection guesses an edge, as on the CPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels.gpu.launch import launch
from thinwire.kernels.reference import select as reference
from thinwire.kernels.reference.select import Memo

ROW = 16_384  # columns that one program can hold
INFINITE = 0x7F800000
LARGEST = torch.finfo(torch.float32).max


@triton.jit
def _measure(x):
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.minimum(bits, 0x7F800000)  # NaN counts as infinite


@triton.jit
def _add(x, grad, alpha, largest):
    """The sum, and 1 where the gradient is not finite: left out; overflow is held."""
    step = alpha * grad
    total = x + step
    ugly = _measure(grad) >= 0x7F800000
    bad = ugly | (_measure(step) >= 0x7F800000)
    held = tl.where(step > 0, largest, -largest)
    total = tl.where(_measure(total) >= 0x7F800000, held, total)
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
        value, bad = _add(value, step, alpha, largest)
        tl.store(x + at, value, mask=inside)
        if tl.sum(bad) > 0:
            tl.atomic_max(counters + 1, 1)
    passes = inside & (_measure(value) >= edge)
    each = passes.to(tl.int32)
    count = tl.sum(each)
    if count > 0:
        start = tl.atomic_add(counters, count)
        place = start + tl.cumsum(each, axis=0) - 1
        tl.store(found + place, at, mask=passes & (place < room))


@triton.jit
def _select_rows(x, grad, alpha, c, k, out, flag, largest, FUSED: tl.constexpr, B: tl.constexpr):
    """One row: add, and the flat indices of its k largest, ascending."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, B)
    inside = column < c
    at = row * c + column
    value = tl.load(x + at, mask=inside, other=0.0)
    if FUSED:
        step = tl.load(grad + at, mask=inside, other=0.0)
        value, bad = _add(value, step, alpha, largest)
        tl.store(x + at, value, mask=inside)
        if tl.sum(tl.where(inside, bad, 0)) > 0:
            tl.atomic_max(flag, 1)
    size = tl.where(inside, _measure(value), -1)
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


def accumulate(residual: Tensor, grad: Tensor, alpha: float = 1.0, decay: float = 1.0) -> bool:
    if decay != 1.0:
        residual.mul_(decay)
    none = torch.empty(0, dtype=torch.int64, device=residual.device)
    return _add_and_find(residual, grad, alpha, INFINITE + 1, none)[1]


def topk(rows: Tensor, k: int, memo: Memo | None = None) -> Tensor:
    return _select(rows, None, 1.0, k, {} if memo is None else memo)[0]


def add_topk(
    residual: Tensor, grad: Tensor, alpha: float, k: int, memo: Memo
) -> tuple[Tensor, bool]:
    return _select(residual, grad, alpha, k, memo)


def above(x: Tensor, edge: float, most: int) -> tuple[Tensor, int]:
    found = torch.empty(most, dtype=torch.int64, device=x.device)
    count, _ = _add_and_find(x, None, 1.0, _to_key(edge), found)
    return found[:count].sort().values if count <= most else found, count


def _select(
    rows: Tensor, grad: Tensor | None, alpha: float, k: int, memo: Memo
) -> tuple[Tensor, bool]:
    r, c = rows.shape
    if k >= c:
        clean = grad is None or accumulate(rows.view(-1), grad.view(-1), alpha)
        return torch.arange(r * c, device=rows.device), clean
    if c <= ROW:
        out = torch.empty(r * k, dtype=torch.int64, device=rows.device)
        flag = torch.zeros(1, dtype=torch.int32, device=rows.device)
        _select_rows[(r,)](
            rows, rows if grad is None else grad, alpha, c, k, out, flag, LARGEST,
            FUSED=grad is not None, B=triton.next_power_of_2(c),
        )  # fmt: skip
        # host sync, where there is a gradient: a rank must know that it aborts before it sends
        return out, grad is None or not bool(flag)
    if r > 1:
        clean = grad is None or accumulate(rows.view(-1), grad.reshape(-1), alpha)
        return reference.topk(rows, k), clean
    return _select_flat(rows.view(-1), None if grad is None else grad.view(-1), alpha, k, memo)


def _select_flat(
    x: Tensor, grad: Tensor | None, alpha: float, k: int, memo: Memo
) -> tuple[Tensor, bool]:
    found = torch.empty(3 * k + 4096, dtype=torch.int64, device=x.device)
    edge = _to_key(memo["guess"]) if "guess" in memo else INFINITE
    count, clean = _add_and_find(x, grad, alpha, edge, found)
    if k <= count <= found.numel():
        candidates = found[:count].sort().values  # programs append in any order
        chosen = candidates[reference.topk(x[candidates][None], k)]
    else:
        chosen = reference.topk(x[None], k)
    # host sync: one number, a guess for the next step
    memo["guess"] = 0.97 * float(x[chosen].abs().min())
    return chosen, clean


def _add_and_find(
    x: Tensor, grad: Tensor | None, alpha: float, edge: int, found: Tensor
) -> tuple[int, bool]:
    counters = torch.zeros(2, dtype=torch.int32, device=x.device)
    launch(
        _sweep, x.numel(), x, x if grad is None else grad, alpha, edge, x.numel(), found,
        found.numel(), counters, LARGEST, FUSED=grad is not None,
    )  # fmt: skip
    count, bad = counters.tolist()  # host sync: whether the guess was good decides what comes next
    return count, bad == 0


def _to_key(edge: float) -> int:
    return int(torch.tensor(max(edge, 0.0), dtype=torch.float32).view(torch.int32))
