"""The inner loops of `scales`, in Numba.

A block fits into the nearest cache, so that what is done to one in several loops reads memory once.
Arrays are whole, `edges` says where those blocks begin and end that `scale` has room for.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from numba import uint8, uint16, uint32

from thinwire.kernels.cpu.arrays import compiled
from thinwire.kernels.cpu.lanes import INFINITE, MASK
from thinwire.kernels.reference import scales as reference
from thinwire.kernels.reference.scales import BROKEN

NOTHING = -32_768  # the power of two of zero
PIECE = 1024  # numbers that stay in the nearest cache from one loop to the next
TOP, TOP_FP8 = np.float32(reference.TOP), np.float32(reference.TOP_FP8)
TOP_HALF = np.float32(reference.TOP_HALF)
_compiled = partial(compiled, fastmath={"reassoc"})


@_compiled("u4(u4[::1])")
def find_largest(bits):
    """The largest magnitude's bits; those of a NaN are larger than infinity's."""
    top = uint32(0)
    for i in range(bits.size):
        top = max(top, bits[i] & uint32(MASK))
    return top


@_compiled(inline="always")
def _mix(x):
    x = uint32((x ^ (x >> uint32(16))) * uint32(0x7FEB352D))  # Numba's products have 64 bits
    x = uint32((x ^ (x >> uint32(15))) * uint32(0x846CA68B))
    return uint32(x ^ (x >> uint32(16)))


@_compiled("void(i8, u4, u4, u4[::1])")
def _draw(first, low, high, out):
    """24 bits at random for every place from `first` on."""
    for j in range(out.size):
        out[j] = _mix(_mix(uint32(first + j) ^ low) ^ high) >> uint32(8)


@_compiled("void(f4[::1], f4, u2[::1])")
def round_half(x, factor, codes):
    y, low = np.empty(PIECE, np.float32), np.empty(PIECE, np.float32)
    bits, low_bits = y.view(np.uint32), low.view(np.uint32)
    for start in range(0, x.size, PIECE):
        part, out = x[start : start + PIECE], codes[start : start + PIECE]
        given = part.view(np.uint32)
        for j in range(part.size):
            y[j] = min(max(part[j], -TOP_HALF), TOP_HALF) * factor  # a finite number stays finite
            low[j] = abs(y[j]) + np.float32(0.5)  # its last bit is half's smallest number
        for j in range(part.size):
            whole, size = given[j] & uint32(MASK), bits[j] & uint32(MASK)
            sign = (given[j] >> uint32(16)) & uint32(0x8000)
            normal = (size + uint32(0xFFF) + ((size >> uint32(13)) & uint32(1))) >> uint32(13)
            small = low_bits[j] - uint32(126 << 23)
            code = small if size < uint32(113 << 23) else normal - uint32(112 << 10)
            code = code if whole < uint32(INFINITE) else uint32(0x7C00)
            code = code if whole <= uint32(INFINITE) else uint32(0x7E00)
            out[j] = uint16(sign | code)


@_compiled("void(u4[::1], u2[::1])")
def round_bf16(bits, codes):
    for i in range(bits.size):
        size = bits[i] & uint32(MASK)
        sign = (bits[i] >> uint32(16)) & uint32(0x8000)
        code = (size + uint32(0x7FFF) + ((size >> uint32(16)) & uint32(1))) >> uint32(16)
        code = min(code, uint32(0x7F7F))  # a finite number stays finite
        code = code if size < uint32(INFINITE) else uint32(0x7F80)
        code = code if size <= uint32(INFINITE) else uint32(0x7FC0)
        codes[i] = uint16(sign | code)


@_compiled("f4(f4[::1], f4, f4[::1])")
def _measure_scale(part, most, scale):
    """The largest magnitude over `most`, NaN if one is not finite; what to divide by."""
    top = find_largest(part.view(np.uint32))
    scale.view(np.uint32)[0] = top
    scale[0] = scale[0] / most if top < uint32(INFINITE) else np.float32(np.nan)
    return scale[0] if scale[0] != 0 else np.float32(1)


@_compiled("void(f4[::1], i8[::1], f4[::1], i1[::1])")
def round_int8(x, edges, scale, codes):
    for b in range(scale.size):
        part, out = x[edges[b] : edges[b + 1]], codes[edges[b] : edges[b + 1]]
        over = _measure_scale(part, np.float32(127), scale[b : b + 1])
        if np.isnan(scale[b]):
            out[:] = 0
            continue
        for j in range(part.size):
            near = np.rint(part[j] / over)
            out[j] = np.int8(min(max(near, np.float32(-127)), np.float32(127)))


@_compiled("i8(i8[::1])")
def find_widest(edges):
    most = 0
    for b in range(edges.size - 1):
        most = max(most, edges[b + 1] - edges[b])
    return most


@_compiled("void(f4[::1], i8[::1], f4[::1], u1[::1])")
def round_fp8(x, edges, scale, codes):
    block = find_widest(edges)
    y, low = np.empty(block, np.float32), np.empty(block, np.float32)
    bits, low_bits = y.view(np.uint32), low.view(np.uint32)
    for b in range(scale.size):
        part, out = x[edges[b] : edges[b + 1]], codes[edges[b] : edges[b + 1]]
        over = _measure_scale(part, TOP_FP8, scale[b : b + 1])
        if np.isnan(scale[b]):
            out[:] = 0
            continue
        for j in range(part.size):
            y[j] = min(max(part[j] / over, -TOP_FP8), TOP_FP8)
            low[j] = abs(y[j]) + np.float32(2**14)  # its last bit is e4m3's smallest number
        for j in range(part.size):
            size = bits[j] & uint32(MASK)
            sign = (bits[j] >> uint32(24)) & uint32(0x80)
            normal = (size + uint32(0x7FFFF) + ((size >> uint32(20)) & uint32(1))) >> uint32(20)
            small = low_bits[j] - uint32((127 + 14) << 23)
            code = small if size < uint32(121 << 23) else normal - uint32(120 << 3)
            out[j] = uint8(sign | code)


@_compiled("void(f4[::1], i8[::1], f4[::1])")
def average(x, edges, scale):
    for b in range(scale.size):
        part, total = x[edges[b] : edges[b + 1]], 0.0
        for j in range(part.size):
            total += abs(np.float64(part[j]))
        mean = total / part.size
        scale[b] = np.float32(mean) if np.isfinite(mean) else np.float32(np.nan)


@_compiled("void(f4[::1], i8[::1], f4[::1], f4[::1])")
def average_signs(x, edges, above, below):
    for b in range(above.size):
        part = x[edges[b] : edges[b + 1]]
        high, low, highs, lows = 0.0, 0.0, np.int32(0), np.int32(0)
        for j in range(part.size):
            high += np.float64(max(part[j], np.float32(0)))
            low += np.float64(min(part[j], np.float32(0)))
        for j in range(part.size):
            highs += np.int32(part[j] > 0)
            lows += np.int32(part[j] < 0)
        broken = find_largest(part.view(np.uint32)) >= uint32(INFINITE)
        above[b] = np.float32(np.nan) if broken else np.float32(high / max(highs, 1))
        below[b] = np.float32(np.nan) if broken else np.float32(low / max(lows, 1))


@_compiled("f8(f4[::1], f4, f4[::1])")
def _divide(x, over, unit):
    """x / over, and the sum of the squares."""
    square = 0.0
    for j in range(x.size):
        unit[j] = x[j] / over
        square += np.float64(unit[j]) * np.float64(unit[j])
    return square


@_compiled("f4(f4[::1], f4, b1, f4[::1])")
def _hold(unit, limit, largest_counts, size):
    """Magnitudes held at the limit, and the largest or the norm of them."""
    top, square = np.float32(0), 0.0
    for j in range(unit.size):
        size[j] = min(abs(unit[j]), limit)
        top = max(top, size[j])
    if largest_counts:
        return top
    for j in range(unit.size):
        square += np.float64(size[j]) * np.float64(size[j])
    return np.float32(np.sqrt(square))


@_compiled("f4(f4[::1], f4[::1], f4, f4, u4[::1], u1[::1])")
def _round(unit, size, over, most, draw, codes):
    """Levels, up or down at random, with their signs; the step that fits them best."""
    for j in range(size.size):
        up = np.float32(np.int32(draw[j])) * np.float32(2.0**-24)
        level = min(np.floor(size[j] / over * most + up), most)
        size[j] = np.copysign(level, unit[j])
    along, square = 0.0, 0.0
    for j in range(size.size):
        along += np.float64(unit[j]) * np.float64(size[j])
        square += np.float64(size[j]) * np.float64(size[j])
    for j in range(size.size):
        codes[j] = uint8(np.int32(size[j] + most))
    return np.float32(along / (square if square != 0 else 1.0))


@_compiled("void(f4[::1], i8[::1], f4, u4, u4, b1, b1, f8, b1, f4[::1], u1[::1])")
def round_levels(x, edges, most, low, high, nearest, largest_counts, clip, fitted, scale, codes):
    block = find_widest(edges)
    units, sizes = np.empty(block, np.float32), np.empty(block, np.float32)
    draws = np.empty(block, np.uint32)
    for b in range(scale.size):
        part, out = x[edges[b] : edges[b + 1]], codes[edges[b] : edges[b + 1]]
        over = _measure_scale(part, np.float32(1), scale[b : b + 1])
        if np.isnan(scale[b]):
            out[:] = uint8(most)
            continue
        unit, size, draw = units[: part.size], sizes[: part.size], draws[: part.size]
        square = _divide(part, over, unit)
        limit = np.float32(clip * np.sqrt(square / part.size)) if square > 0 else np.float32(0)
        norm = _hold(unit, limit, largest_counts, size)
        if nearest:
            draw[:] = uint32(1 << 23)  # a half
        else:
            _draw(edges[b], low, high, draw)
        step = _round(unit, size, norm if norm != 0 else np.float32(1), most, draw, out)
        scale[b] *= step if fitted else norm / most


@_compiled("i8(f4[::1], u4, u4, i8, i2[::1])")
def round_powers(x, low, high, first, power):
    """The power of two of every number, at random up or down; the largest, NOTHING of zeros."""
    y, draw = np.empty(PIECE, np.float32), np.empty(PIECE, np.uint32)
    bits, top = y.view(np.uint32), np.int32(NOTHING)
    ugly = find_largest(x.view(np.uint32)) >= uint32(INFINITE)
    for start in range(0, x.size, PIECE):
        part, out = x[start : start + PIECE], power[start : start + PIECE]
        numbers = part.view(np.uint32)
        _draw(first + start, low, high, draw[: part.size])
        for j in range(part.size):  # those below the normal numbers become normal
            small = (numbers[j] & uint32(MASK)) < uint32(1 << 23)
            y[j] = abs(part[j]) * (np.float32(2.0**64) if small else np.float32(1))
        for j in range(part.size):
            size = numbers[j] & uint32(MASK)
            shift = np.int32(127 + 64) if size < uint32(1 << 23) else np.int32(127)
            up = draw[j] < (bits[j] & uint32(0x7FFFFF)) << uint32(1)
            exponent = np.int32(bits[j] >> uint32(23)) - shift + np.int32(up)
            exponent = min(exponent, np.int32(127)) if size != 0 else np.int32(NOTHING)
            out[j] = np.int16(exponent)
            top = max(top, exponent)
    return np.int64(BROKEN) if ugly else np.int64(top)


@_compiled("void(u4[::1], i2[::1], i8, u1[::1])")
def count_down(bits, power, top, codes):
    """Powers counted down from the largest, and signs."""
    for i in range(bits.size):
        below = np.int32(top) - np.int32(power[i])
        there = below < 127
        sign = (bits[i] >> uint32(24)) & uint32(0x80)
        codes[i] = uint8(uint32(below + 1) | sign) if there else uint8(0)
