"""The inner loops of `scales` that turn codes back into numbers, in Numba.

Numbers go in place of what is there; or, if it `adds`, alpha times them are added to it. A block
or piece fits into the nearest cache, so that what is done to it in several loops reads memory once.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from numba import uint16, uint32

from thinwire.kernels.cpu.arrays import compiled
from thinwire.kernels.cpu.lanes import INFINITE
from thinwire.kernels.cpu.scales_loops import PIECE, TOP, find_widest

_compiled = partial(compiled, fastmath={"reassoc"})


@_compiled("void(u1[::1], f4[::1], f4[::1], i8[::1], f4[::1])")
def choose(signs, above, below, edges, out):
    for b in range(above.size):
        part, here = signs[edges[b] : edges[b + 1]], out[edges[b] : edges[b + 1]]
        high, low = above[b], below[b]
        for j in range(part.size):
            here[j] = high if part[j] > 0 else low


@_compiled("void(u1[::1], f4[::1], f4[::1])")
def look_up(codes, table, out):
    for i in range(out.size):
        out[i] = table[codes[i]]


@_compiled([f"void({kind}[::1], f4, f4[::1])" for kind in ("i1", "f4")])
def _scale(codes, step, out):
    for j in range(codes.size):
        out[j] = np.float32(codes[j]) * step
    if abs(step) > TOP / np.float32(512):  # few blocks are so large; NaN stays
        for j in range(codes.size):
            out[j] = min(max(out[j], -TOP), TOP)


@_compiled("void(f4[::1], f4, b1, f4[::1])")
def _place(values, alpha, adds, out):
    if adds:
        for j in range(values.size):
            out[j] += alpha * values[j]
    else:
        out[:] = values


@_compiled("void(u2[::1], f4, b1, f4[::1])")
def widen_bf16(codes, alpha, adds, out):
    near = np.empty(PIECE, np.float32)
    bits = near.view(np.uint32)
    for start in range(0, codes.size, PIECE):
        part, here = codes[start : start + PIECE], out[start : start + PIECE]
        for j in range(part.size):
            bits[j] = uint32(part[j]) << uint32(16)
        _place(near[: part.size], alpha, adds, here)


@_compiled("void(u2[::1], f4, f4, b1, f4[::1])")
def widen_half(codes, factor, alpha, adds, out):
    near = np.empty(PIECE, np.float32)
    bits = near.view(np.uint32)
    for start in range(0, codes.size, PIECE):
        part, here = codes[start : start + PIECE], out[start : start + PIECE]
        for j in range(part.size):
            bits[j] = (uint32(part[j]) & uint32(0x7FFF)) << uint32(13)
        for j in range(part.size):  # the exponent's bias, also of numbers below the normal ones
            near[j] = near[j] * np.float32(2.0**112)
        for j in range(part.size):
            broken = (part[j] & uint16(0x7C00)) == uint16(0x7C00)
            size = bits[j] | (uint32(INFINITE) if broken else uint32(0))
            bits[j] = size | (uint32(part[j]) & uint32(0x8000)) << uint32(16)
        for j in range(part.size):
            near[j] = near[j] * factor
        _place(near[: part.size], alpha, adds, here)


@_compiled("void(u1[::1], f4[::1], f4[::1], i8[::1], f4, b1, f4[::1])")
def look_up_scaled(codes, table, scale, edges, alpha, adds, out):
    values = np.empty(find_widest(edges), np.float32)
    for b in range(scale.size):
        part, here = codes[edges[b] : edges[b + 1]], out[edges[b] : edges[b + 1]]
        near = values[: part.size]
        look_up(part, table, near)
        _scale(near, scale[b], near)
        _place(near, alpha, adds, here)


@_compiled("void(i1[::1], f4[::1], i8[::1], f4, b1, f4[::1])")
def multiply(codes, scale, edges, alpha, adds, out):
    values = np.empty(find_widest(edges), np.float32)
    for b in range(scale.size):
        part, here = codes[edges[b] : edges[b + 1]], out[edges[b] : edges[b + 1]]
        if not adds:
            _scale(part, scale[b], here)
            continue
        near = values[: part.size]
        _scale(part, scale[b], near)
        _place(near, alpha, adds, here)
