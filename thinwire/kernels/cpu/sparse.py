"""Sparse sums and lists of positions, in Numba."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numba import uint32, uintp
from torch import Tensor

from thinwire.kernels.cpu.arrays import as_array, as_tensor, compiled, run_parts
from thinwire.kernels.cpu.lanes import INFINITE, LINE, MASK, fence, stream
from thinwire.kernels.reference.sparse import Runs

BLOCK = 4096  # numbers that stay in the nearest cache while they are written


def gather(x: Tensor, indices: Tensor) -> Tensor:
    out = np.empty(indices.numel(), np.float32)
    if not _gather(as_array(x), as_array(indices), out):
        raise IndexError(f"indices outside the {x.numel()} entries that are asked for")
    return as_tensor(out)


def scatter_add(out: Tensor, indices: Tensor, values: Tensor, alpha: float = 1.0) -> Tensor:
    weight = np.float32(alpha)
    if not _scatter_add(as_array(out), as_array(indices), as_array(values), weight):
        raise IndexError(f"indices outside the {out.numel()} entries that they are added into")
    return out


def merged(indices: Sequence[Tensor], values: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    index, value = as_array(indices[0]), as_array(values[0])
    for other, more in zip(indices[1:], values[1:], strict=True):
        size = index.size + other.numel()
        where, sums = np.empty(size, np.int64), np.empty(size, np.float32)
        size = _merge(index, value, as_array(other), as_array(more), where, sums)
        index, value = where[:size], sums[:size]
    return as_tensor(index), as_tensor(value)


def filled(out: Tensor, runs: Runs, indices: Tensor, values: Tensor, alpha: float) -> float:
    edges = np.array(runs, np.int64).reshape(-1)
    inside = edges.size == 0 or (edges[0] >= 0 and edges[-1] <= out.numel())
    target, where, what, weight = (
        as_array(out),
        as_array(indices),
        as_array(values),
        np.float32(alpha),
    )
    starts = _find_payloads(where, target.size)

    def part(low: int, high: int) -> tuple[int, int]:
        peak, used = _fill(target, edges, starts, where, what, weight, low, high)
        return int(peak), int(used)

    parts = run_parts(target.size, part) if inside and starts.size else [(-1, 0)]
    if min(peak for peak, _ in parts) < 0 or sum(used for _, used in parts) != where.size:
        raise IndexError(f"indices outside the {out.numel()} entries that they are written into")
    peak = max(peak for peak, _ in parts)
    return float(np.uint32(min(peak, INFINITE)).view(np.float32))


def ascending(indices: Tensor, numel: int) -> bool:
    return bool(_ascending(as_array(indices), numel))


def member(indices: Tensor, others: Tensor) -> Tensor:
    out = np.empty(indices.numel(), np.bool_)
    _member(as_array(indices), as_array(others), out)
    return as_tensor(out)


def compress(indices: Tensor, values: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    n = indices.numel()
    where, what = np.empty(n + 1, np.int64), np.empty(n + 1, np.float32)  # it writes, then counts
    count = _compress(as_array(indices), as_array(values), as_array(kept), where, what)
    return as_tensor(where[:count]), as_tensor(what[:count])


@compiled("b1(f4[::1], i8[::1], f4[::1])")
def _gather(x, indices, out):
    """out = x[indices]; False if one is outside."""
    for i in range(indices.size):
        if indices[i] < 0 or indices[i] >= x.size:
            return False
        out[i] = x[indices[i]]
    return True


@compiled("b1(f4[::1], i8[::1], f4[::1], f4)")
def _scatter_add(out, indices, values, alpha):
    """out[indices] += alpha * values, in order; False, and nothing is done, if one is outside."""
    for i in range(indices.size):
        if indices[i] < 0 or indices[i] >= out.size:
            return False
    for i in range(indices.size):
        out[indices[i]] += alpha * values[i]
    return True


@compiled(inline="always")
def _put(block, out):
    """Written past the caches, but for the ends, which share their lines with others."""
    here, there = block.ctypes.data, out.ctypes.data
    head = min(out.size, (-there % LINE) // 4)
    whole = out.size - (out.size - head) % (LINE // 4)
    out[:head] = block[:head]
    for a in range(head, whole, LINE // 4):
        stream(uintp(here + 4 * a), uintp(there + 4 * a))
    out[whole:] = block[whole:]


@compiled("i8[::1](i8[::1], i8)")
def _find_payloads(indices, numel):
    """Where stretches of ascending indices begin, and the end; nothing if an index is outside."""
    count = 1
    for i in range(indices.size):
        if indices[i] < 0 or indices[i] >= numel:
            return np.empty(0, np.int64)
        count += i == 0 or indices[i] < indices[i - 1]
    out, w = np.empty(count, np.int64), 0
    for i in range(indices.size):
        if i == 0 or indices[i] < indices[i - 1]:
            out[w] = i
            w += 1
    out[w] = indices.size
    return out


@compiled("UniTuple(i8, 2)(f4[::1], i8[::1], i8[::1], i8[::1], f4[::1], f4, i8, i8)")
def _fill(out, runs, starts, indices, values, alpha, low, high):
    """out = 0 in the runs, out[indices] += alpha * values, from `low` up to `high`: a block at a
    time, in cache, and from there past the caches into memory, which need not be read for it.

    The bits of the largest magnitude on the way, and how many indices were used; -1, and out is not
    to be used, if one is outside the runs.
    """
    at, ends = np.empty(starts.size - 1, np.int64), np.empty(starts.size - 1, np.int64)
    used = 0
    for run in range(at.size):
        ours = indices[starts[run] : starts[run + 1]]
        at[run] = starts[run] + np.searchsorted(ours, low)
        ends[run] = starts[run] + np.searchsorted(ours, high)
        used += ends[run] - at[run]
    block = np.empty(BLOCK, np.float32)
    bits, peak = block.view(np.uint32), uint32(0)
    for place in range(0, runs.size, 2):
        last = min(runs[place + 1], high)
        for start in range(max(runs[place], low), last, BLOCK):
            stop = min(last, start + BLOCK)
            block[: stop - start] = 0
            for run in range(at.size):
                i, end = at[run], ends[run]
                while i < end and indices[i] < stop:
                    j = indices[i] - start
                    if j < 0:
                        return -1, 0
                    block[j] += alpha * values[i]
                    peak = max(peak, bits[j] & uint32(MASK))
                    i += 1
                at[run] = i
            _put(block[: stop - start], out[start:stop])
    fence()
    for run in range(at.size):
        if at[run] < ends[run]:
            return -1, 0
    return np.int64(peak), used


@compiled("b1(i8[::1], i8)")
def _ascending(indices, numel):
    """Whether they ascend from 0 on and stay below numel."""
    last, well = np.int64(-1), True
    for i in range(indices.size):
        well &= indices[i] > last
        last = indices[i]
    return well and last < numel


@compiled("void(i8[::1], i8[::1], b1[::1])")
def _member(indices, others, out):
    """Which of the ascending indices are among the others, ascending too."""
    j = 0
    for i in range(indices.size):
        while j < others.size and others[j] < indices[i]:
            j += 1
        out[i] = j < others.size and others[j] == indices[i]


@compiled("i8(i8[::1], f4[::1], b1[::1], i8[::1], f4[::1])")
def _compress(indices, values, kept, out_indices, out):
    """The entries whose flag is set; how many they are."""
    w = 0
    for i in range(indices.size):
        out_indices[w] = indices[i]
        out[w] = values[i]
        w += kept[i]
    return w


@compiled("i8(i8[::1], f4[::1], i8[::1], f4[::1], i8[::1], f4[::1])")
def _merge(index, value, other_index, other, out_index, out):
    """The sum of two ascending payloads, ascending; how many entries it has."""
    i, j, w = 0, 0, 0
    while i < index.size and j < other_index.size:
        a, b = index[i], other_index[j]
        out_index[w] = min(a, b)
        out[w] = (value[i] if a <= b else np.float32(0)) + (other[j] if b <= a else np.float32(0))
        i += a <= b
        j += b <= a
        w += 1
    for left_index, left, start in ((index, value, i), (other_index, other, j)):
        for at in range(start, left.size):
            out_index[w], out[w] = left_index[at], left[at]
            w += 1
    return w
