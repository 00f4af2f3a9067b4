"""Golomb-Rice codes and sparse sums on the CPU, in Numba; `rice` and `reference` define them.

Bits are written through a 64-bit window. Readers check every length before they read, and say with
a negative number what was wrong; nothing is read or written outside its array.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from numba import njit, types, uint8, uint32, uint64, uintp

from thinwire.kernels.lanes import LINE, MASK, fence, first, stream
from thinwire.kernels.rice import GROUP, MOST

BLOCK = 4096  # numbers that stay in the nearest cache while they are written

_bytes, _longs, _floats = types.uint8[::1], types.int64[::1], types.float32[::1]
_flags = types.boolean[::1]
_long, _float, _flag = types.int64, types.float32, types.boolean
_compiled = partial(njit, nogil=True, cache=True, error_model="numpy")


@_compiled(types.UniTuple(_long, 2)(_longs, _bytes))
def rice_sizes(indices, groups):
    """The best m of every group, and how many bits the unary and the low parts take."""
    unary, low = 0, 0
    for g in range(groups.size):
        start, stop = g * GROUP, min(indices.size, (g + 1) * GROUP)
        count = stop - start
        before = indices[start - 1] if start > 0 else -1
        mean = max(1, (indices[stop - 1] - before - count) // count)
        near = -1
        while mean > 0:
            near += 1
            mean >>= 1
        best, fewest, chosen = -1, 0, 0
        for shift in range(near - 1, near + 2):
            m = min(max(shift, 0), MOST)
            last, bits = before, 0
            for i in range(start, stop):
                bits += (indices[i] - last - 1) >> m
                last = indices[i]
            if best < 0 or bits + count * m < best:
                best, fewest, chosen = bits + count * m, bits, m
        groups[g] = chosen
        unary += fewest + count
        low += count * chosen
    return unary, low


@_compiled(types.void(_longs, _bytes, _bytes, _bytes))
def rice_write(indices, groups, low, unary):
    """The low bits and the unary parts; both arrays are zero and long enough."""
    window, held, w, place, last = uint64(0), 0, 0, 0, -1
    for i in range(indices.size):
        m = np.int64(groups[i // GROUP])
        gap = indices[i] - last - 1
        last = indices[i]
        window |= uint64(gap & ((1 << m) - 1)) << uint64(held)
        held += m
        while held >= 8:
            low[w] = uint8(window & uint64(255))
            w += 1
            window >>= uint64(8)
            held -= 8
        place += gap >> m
        unary[place >> 3] |= uint8(1 << (place & 7))
        place += 1
    if held > 0:
        low[w] = uint8(window & uint64(255))


@_compiled(_long(_bytes, _bytes, _bytes, _long, _longs))
def rice_read(groups, low, unary, numel, out):
    """Positions below numel; -1 if there are fewer unary parts, -2 if more, -3 if out of range."""
    window, held, r, last = uint64(0), 0, 0, -1
    b, bits = 0, uint64(0)  # the next byte of unary parts, and what is left of those read
    base = 0  # bits of unary parts before these
    ended = -1  # where the last unary part ended
    for i in range(out.size):
        while bits == 0:
            if b >= unary.size:
                return -1
            base, bits = 8 * b, uint64(unary[b])
            b += 1
        place = base + np.int64(first(bits))
        bits &= bits - uint64(1)
        m = np.int64(groups[i // GROUP])
        while held < m:
            if r >= low.size:
                return -1
            window |= uint64(low[r]) << uint64(held)
            r += 1
            held += 8
        part = np.int64(window & ((uint64(1) << uint64(m)) - uint64(1)))
        window >>= uint64(m)
        held -= m
        high = place - ended - 1
        if high > numel >> m:
            return -3
        last += ((high << m) | part) + 1
        if last >= numel:
            return -3
        out[i] = last
        ended = place
    return 0 if bits == 0 and b == unary.size else -2


@_compiled(_flag(_floats, _longs, _floats))
def gather(x, indices, out):
    """out = x[indices]; False if one is outside."""
    for i in range(indices.size):
        if indices[i] < 0 or indices[i] >= x.size:
            return False
        out[i] = x[indices[i]]
    return True


@_compiled(_flag(_floats, _longs, _floats, _float))
def scatter_add(out, indices, values, alpha):
    """out[indices] += alpha * values, in order; False, and nothing is done, if one is outside."""
    for i in range(indices.size):
        if indices[i] < 0 or indices[i] >= out.size:
            return False
    for i in range(indices.size):
        out[indices[i]] += alpha * values[i]
    return True


@_compiled(inline="always")
def _put(block, out):
    """Written past the caches, but for the ends, which share their lines with others."""
    here, there = block.ctypes.data, out.ctypes.data
    head = min(out.size, (-there % LINE) // 4)
    whole = out.size - (out.size - head) % (LINE // 4)
    out[:head] = block[:head]
    for a in range(head, whole, LINE // 4):
        stream(uintp(here + 4 * a), uintp(there + 4 * a))
    out[whole:] = block[whole:]


@_compiled(_longs(_longs, _long))
def payloads(indices, numel):
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


@_compiled(types.UniTuple(_long, 2)(_floats, _longs, _longs, _longs, _floats, _float, _long, _long))
def fill(out, runs, starts, indices, values, alpha, low, high):
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


@_compiled(_flag(_longs, _long))
def ascending(indices, numel):
    """Whether they ascend from 0 on and stay below numel."""
    last, well = np.int64(-1), True
    for i in range(indices.size):
        well &= indices[i] > last
        last = indices[i]
    return well and last < numel


@_compiled(types.void(_longs, _longs, _flags))
def member(indices, others, out):
    """Which of the ascending indices are among the others, ascending too."""
    j = 0
    for i in range(indices.size):
        while j < others.size and others[j] < indices[i]:
            j += 1
        out[i] = j < others.size and others[j] == indices[i]


@_compiled(_long(_longs, _floats, _flags, _longs, _floats))
def compress(indices, values, kept, out_indices, out):
    """The entries whose flag is set; how many they are."""
    w = 0
    for i in range(indices.size):
        out_indices[w] = indices[i]
        out[w] = values[i]
        w += kept[i]
    return w


@_compiled(_long(_longs, _floats, _longs, _floats, _longs, _floats))
def merge(index, value, other_index, other, out_index, out):
    """The sum of two ascending payloads, ascending; how many entries it has."""
    i, j, w = 0, 0, 0
    while i < index.size and j < other_index.size:
        a, b = index[i], other_index[j]
        out_index[w] = min(a, b)
        out[w] = (value[i] if a <= b else np.float32(0)) + (other[j] if b <= a else np.float32(0))
        i += a <= b
        j += b <= a
        w += 1
    while i < index.size:
        out_index[w], out[w] = index[i], value[i]
        i += 1
        w += 1
    while j < other_index.size:
        out_index[w], out[w] = other_index[j], other[j]
        j += 1
        w += 1
    return w
