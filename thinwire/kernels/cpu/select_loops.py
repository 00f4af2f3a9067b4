"""The inner loops of `select`, in Numba over the vectors of `lanes`.

Numba's cache looks at this file's date only: touch it after a change of `lanes`. Magnitudes are
handled as the bits of their floats (`keys`).
"""

from __future__ import annotations

import numpy as np
from numba import uint32, uint64, uintp

from thinwire.kernels.cpu import lanes
from thinwire.kernels.cpu.arrays import compiled
from thinwire.kernels.cpu.lanes import INFINITE, LANES, MASK

LOW = 15  # bits of a magnitude that `tally` leaves out
PIECE = 4096  # numbers that stay in the nearest cache from one loop to the next
LARGEST = np.float32(np.finfo(np.float32).max)


@compiled(inline="always")
def _measure(bits):
    return min(bits & uint32(MASK), uint32(INFINITE))


@compiled("b1(f4[::1], f4[::1], f4, i8, u4)")
def _mend(residual, grad, alpha, at, bad):
    """Lanes that did not add up to a number: overflow is held at the largest, others left out."""
    clean = True
    while bad != 0:
        i = at + lanes.find_first(bad)
        bad &= bad - uint32(1)
        step = alpha * grad[i]
        clean &= np.isfinite(step)
        if np.isfinite(grad[i]):
            residual[i] = LARGEST if step > 0 else -LARGEST
    return clean


@compiled(inline="always")
def _add_one(residual, grad, alpha, i):
    total = residual[i] + alpha * grad[i]
    if np.isfinite(total):
        residual[i] = total
        return True
    return _mend(residual, grad, alpha, i, uint32(1))


@compiled("Tuple((i8, b1))(f4[::1], u4[::1], f4[::1], f4, u4, i8[::1], u4[::1])")
def sweep(x, bits, grad, alpha, edge, found, keys):
    """x += alpha * grad, if there is a grad; where |x| reaches the edge: how many, and the first
    of them with their magnitudes. Also whether every gradient was finite."""
    count, clean, room, fused = 0, True, found.size, grad.size > 0
    whole = x.size - x.size % LANES
    here, there = x.ctypes.data, grad.ctypes.data
    a, bad = 0, uint32(0)
    while a < whole:
        while a < whole:  # no call in here: it would cost the registers that hold the vectors
            if fused:
                both = lanes.add_and_test(uintp(here + 4 * a), uintp(there + 4 * a), alpha, edge)
                mask, bad = uint32(both), uint32(both >> uint64(LANES))
                if bad != 0:
                    break
            else:
                mask = lanes.test(uintp(here + 4 * a), edge)
            if mask != 0:
                if count + LANES > room:
                    count += lanes.count_ones(mask)  # too many: from here on they are only counted
                    mask = uint32(0)
                while mask != 0:
                    i = a + lanes.find_first(mask)
                    found[count] = i
                    keys[count] = _measure(bits[i])
                    count += 1
                    mask &= mask - uint32(1)
            a += LANES
        if bad != 0:
            clean &= _mend(x, grad, alpha, a, bad)
            for i in range(a, a + LANES):
                if _measure(bits[i]) >= edge:
                    if count < room:
                        found[count] = i
                        keys[count] = _measure(bits[i])
                    count += 1
            a, bad = a + LANES, uint32(0)
    for i in range(whole, x.size):
        if fused:
            clean &= _add_one(x, grad, alpha, i)
        if _measure(bits[i]) >= edge:
            if count < room:
                found[count] = i
                keys[count] = _measure(bits[i])
            count += 1
    return count, clean


@compiled("void(f4[::1], f4)")
def _fade(x, decay):
    for i in range(x.size):
        x[i] *= decay


@compiled("b1(f4[::1], u4[::1], f4[::1], f4, f4)")
def fade_and_add(x, bits, grad, alpha, decay):
    """x = decay * x + alpha * grad, piece by piece; whether every gradient was finite."""
    clean, none, keys = True, np.empty(0, np.int64), np.empty(0, np.uint32)
    for start in range(0, x.size, PIECE):
        here = slice(start, start + PIECE)
        _fade(x[here], decay)
        clean &= sweep(x[here], bits[here], grad[here], alpha, uint32(INFINITE + 1), none, keys)[1]
    return clean


@compiled("void(u4[::1], i8[::1])")
def tally(bits, counts):
    """How many magnitudes there are with the same upper bits."""
    for i in range(bits.size):
        counts[_measure(bits[i]) >> uint32(LOW)] += 1


@compiled("void(i8[::1], u4[::1], u4, i8, i8[::1])")
def cut(found, keys, edge, k, out):
    """The k of them that reach the exact edge; of those on it, the first."""
    above = 0
    for i in range(found.size):
        above += keys[i] > edge
    ties, w = k - above, 0
    for i in range(found.size):
        on = keys[i] == edge and ties > 0
        if w < k:
            out[w] = found[i]
        w += on or keys[i] > edge
        ties -= on


@compiled("u4(u4[::1], i8, i8)")
def _find_kth(keys, count, k):
    """The k-th largest of the first `count` keys, which are moved about (quickselect).

    Pivots are drawn at random, so that no order of the input is a bad one.
    """
    low, high, draw = 0, count - 1, uint64(88172645463325252)
    while low < high:
        draw ^= draw << uint64(13)
        draw ^= draw >> uint64(7)
        draw ^= draw << uint64(17)
        pivot = keys[low + np.int64(draw % uint64(high - low + 1))]
        i, j = low, high
        while i <= j:
            while keys[i] > pivot:
                i += 1
            while keys[j] < pivot:
                j -= 1
            if i <= j:
                keys[i], keys[j] = keys[j], keys[i]
                i += 1
                j -= 1
        if k - 1 <= j:
            high = j
        elif k - 1 >= i:
            low = i
        else:
            break
    return keys[k - 1]


@compiled("u4(u4[::1], i8)")
def _find_bound(tops, k):
    """What at least k of the tops reach, and hardly more: their k-th largest to 12 bits."""
    at = tops.ctypes.data
    low, high = uint32(0), uint32(INFINITE + 1)  # k reach the one, fewer the other
    while high - low > uint32(1) and high - low > low >> uint32(12):
        middle = low + ((high - low) >> uint32(1))
        count = uint32(0)
        for a in range(0, tops.size, LANES):
            count += lanes.count_ones(lanes.reach(uintp(at + 4 * a), middle))
        if count >= k:
            low = middle
        else:
            high = middle
    return low


@compiled("i8(i8[::1], u4[::1], i8, i8, i8[::1], i8)")
def _rank(found, keys, count, k, out, w):
    """The k largest of at most 32, without a branch: each counts who comes before it."""
    at = uintp(keys.ctypes.data)
    for i in range(count, LANES):
        keys[i] = 0
    for i in range(count):
        above = lanes.reach(at, keys[i] + uint32(1))
        level = lanes.reach(at, keys[i]) ^ above
        earlier = level & ((uint32(1) << uint32(i)) - uint32(1))
        out[w] = found[i]
        w += lanes.count_ones(above) + lanes.count_ones(earlier) < uint32(k)
    return w


@compiled(inline="always")
def _add_and_raise(x, bits, grad, alpha, start, stop, tops, found, keys):
    """x += alpha * grad in a row, if there is a grad; tops: the largest magnitude of each group.

    Blocks that are not finite are mended afterwards: a call inside the loop would cost the
    registers that hold the vectors.
    """
    q, broken, whole = 0, 0, stop - (stop - start) % LANES
    here, there, top = x.ctypes.data, grad.ctypes.data, tops.ctypes.data
    for j in range(tops.size):
        tops[j] = 0
    if grad.size == 0:
        for a in range(start, whole, LANES):
            lanes.only_raise(uintp(here + 4 * a), uintp(top + 4 * q))
            q += LANES
            if q == tops.size:
                q = 0
    else:
        for a in range(start, whole, LANES):
            bad = lanes.add_and_raise(
                uintp(here + 4 * a), uintp(there + 4 * a), alpha, uintp(top + 4 * q)
            )
            if bad != 0:
                found[broken], keys[broken] = a, bad
                broken += 1
            q += LANES
            if q == tops.size:
                q = 0
        for i in range(whole, stop):
            total = x[i] + alpha * grad[i]
            if np.isfinite(total):
                x[i] = total
            else:
                found[broken], keys[broken] = i, uint32(1)
                broken += 1
    clean = True
    for b in range(broken):
        clean &= _mend(x, grad, alpha, found[b], keys[b])
        for i in range(found[b], min(whole, found[b] + LANES)):
            group = (i - start) % tops.size
            tops[group] = max(tops[group], _measure(bits[i]))
    for i in range(whole, stop):
        tops[i - whole] = max(tops[i - whole], _measure(bits[i]))
    return clean


@compiled(inline="always")
def _collect(x, bits, start, stop, edge, masks, found, keys):
    """Where |x| reaches the edge. Two loops: the first has no branch that could be mispredicted."""
    here, whole, count = x.ctypes.data, stop - (stop - start) % (2 * LANES), 0
    for a in range(start, whole, 2 * LANES):
        low = lanes.test(uintp(here + 4 * a), edge)
        high = lanes.test(uintp(here + 4 * (a + LANES)), edge)
        masks[(a - start) // (2 * LANES)] = uint64(low) | uint64(high) << uint64(LANES)
    for a in range(start, whole, 2 * LANES):
        mask = masks[(a - start) // (2 * LANES)]
        while mask != 0:
            i = a + np.int64(lanes.find_first(mask))
            found[count] = i
            keys[count] = _measure(bits[i])
            count += 1
            mask &= mask - uint64(1)
    for i in range(whole, stop):
        found[count] = i
        keys[count] = _measure(bits[i])
        count += keys[count] >= edge
    return count


@compiled("b1(f4[::1], u4[::1], f4[::1], f4, i8, i8, u4[::1], u8[::1], i8[::1], u4[::1], i8[::1])")
def select_rows(x, bits, grad, alpha, c, k, tops, masks, found, keys, out):
    """Every row of c entries: add, and the flat indices of its k largest, ascending."""
    clean, w = True, 0
    for start in range(0, x.size, c):
        clean &= _add_and_raise(x, bits, grad, alpha, start, start + c, tops, found, keys)
        edge = _find_bound(tops, k) if k <= tops.size else uint32(0)
        count = _collect(x, bits, start, start + c, edge, masks, found, keys)
        if count <= LANES:
            w = _rank(found, keys, count, k, out, w)
        else:
            edge = _find_kth(keys[:count].copy(), count, k)
            cut(found[:count], keys, edge, k, out[w:])
            w += k
    return clean
