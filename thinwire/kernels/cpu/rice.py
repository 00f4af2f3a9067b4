"""Golomb-Rice codes of positions, in Numba.

Bits are written through a 64-bit window. Readers check every length before they read, and say with
a negative number what was wrong; nothing is read or written outside its array.
"""

from __future__ import annotations

import numpy as np
from numba import uint8, uint64
from torch import Tensor

from thinwire.kernels.cpu.arrays import as_array, as_tensor, compiled
from thinwire.kernels.cpu.lanes import find_first
from thinwire.kernels.reference.rice import GROUP, MOST


def rice_size(indices: Tensor) -> int:
    groups = np.empty(-(-indices.numel() // GROUP), np.uint8)
    unary, low = _choose_groups(as_array(indices), groups)
    return int(groups.size + -(-low // 8) + -(-unary // 8))


def rice_encode(indices: Tensor) -> Tensor:
    index = as_array(indices)
    head = -(-index.size // GROUP)
    groups = np.empty(head, np.uint8)
    unary, low = _choose_groups(index, groups)
    cut = head + -(-low // 8)
    out = np.zeros(cut + -(-unary // 8), np.uint8)
    out[:head] = groups
    _write(index, groups, out[head:cut], out[cut:])
    return as_tensor(out)


def rice_decode(data: Tensor, k: int, numel: int) -> Tensor | None:
    message, head = as_array(data), -(-k // GROUP)
    groups = message[:head]
    if groups.size != head or (head and int(groups.max()) > MOST):
        return None
    bits = int(groups.sum(dtype=np.int64)) * GROUP
    if head:
        bits -= (head * GROUP - k) * int(groups[-1])
    cut = head + -(-bits // 8)
    out = np.empty(k, np.int64)
    if message.size < cut or _read(groups, message[head:cut], message[cut:], numel, out):
        return None
    return as_tensor(out)


@compiled("UniTuple(i8, 2)(i8[::1], u1[::1])")
def _choose_groups(indices, groups):
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


@compiled("void(i8[::1], u1[::1], u1[::1], u1[::1])")
def _write(indices, groups, low, unary):
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


@compiled("i8(u1[::1], u1[::1], u1[::1], i8, i8[::1])")
def _read(groups, low, unary, numel, out):
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
        place = base + np.int64(find_first(bits))
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
