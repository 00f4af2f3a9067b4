"""Codes and positions in few bits, in Numba: one pass where plain torch takes several.

Packing, which works on the whole gradient, takes as many threads as torch has. Codes of positions
work on the few that were chosen, and take one.
"""

from __future__ import annotations

import numpy as np
from numba import uint8
from torch import Tensor

from thinwire.kernels.cpu.arrays import PART, as_array, as_tensor, compiled, run_parts
from thinwire.kernels.reference.bits import BLOCK


def pack(codes: Tensor, bits: int) -> Tensor:
    if bits == 8:
        return codes
    numbers, each = as_array(codes), 8 // bits
    out = np.zeros(-(-numbers.size // each), np.uint8)

    def part(start: int, stop: int) -> None:
        _pack(numbers[each * start : each * stop], bits, out[start:stop])

    run_parts(out.size, part, unit=PART // each)
    return as_tensor(out)


def unpack(data: Tensor, bits: int, n: int) -> Tensor:
    if bits == 8:
        return data
    message, out, each = as_array(data), np.empty(n, np.uint8), 8 // bits

    def part(start: int, stop: int) -> None:
        _unpack(message[start:stop], bits, out[each * start : each * stop])

    run_parts(-(-n // each), part, unit=PART // each)
    return as_tensor(out)


def bitmap_encode(indices: Tensor, numel: int) -> Tensor:
    out = np.zeros(-(-numel // 8), np.uint8)
    if not _mark(as_array(indices), numel, out):
        raise IndexError(f"indices outside the {numel} entries of the bitmap")
    return as_tensor(out)


def bitmap_decode(data: Tensor, k: int, numel: int) -> Tensor | None:
    out = np.empty(k, np.int64)
    return as_tensor(out) if _find(as_array(data), numel, out) == k else None


def block_encode(indices: Tensor, numel: int) -> tuple[Tensor, Tensor]:
    counts = np.zeros(-(-numel // BLOCK), np.int32)
    low = np.empty(indices.numel(), np.uint16)
    if not _split(as_array(indices), numel, counts, low):
        raise IndexError(f"indices outside the {numel} entries of the bucket")
    return as_tensor(counts), as_tensor(low)


def block_decode(counts: Tensor, low: Tensor) -> Tensor | None:
    out = np.empty(low.numel(), np.int64)
    return as_tensor(out) if _join(as_array(counts), as_array(low), out) else None


@compiled("void(u1[::1], i8, u1[::1])")
def _pack(codes, bits, out):
    each = 8 // bits
    whole = codes.size // each
    for j in range(whole):
        byte = uint8(0)
        for e in range(each):
            byte |= codes[j * each + e] << uint8(bits * e)
        out[j] = byte
    for i in range(whole * each, codes.size):
        out[whole] |= codes[i] << uint8(bits * (i % each))


@compiled("void(u1[::1], i8, u1[::1])")
def _unpack(data, bits, out):
    each, low = 8 // bits, uint8((1 << bits) - 1)
    whole = out.size // each
    for j in range(whole):
        for e in range(each):
            out[j * each + e] = (data[j] >> uint8(bits * e)) & low
    for i in range(whole * each, out.size):
        out[i] = (data[whole] >> uint8(bits * (i % each))) & low


@compiled("b1(i8[::1], i8, u1[::1])")
def _mark(indices, numel, out):
    for i in range(indices.size):
        at = indices[i]
        if at < 0 or at >= numel:
            return False
        out[at >> 3] |= uint8(1) << uint8(at & 7)
    return True


@compiled("i8(u1[::1], i8, i8[::1])")
def _find(data, numel, out):
    """How many positions are marked; those that there is room for are written."""
    count = 0
    for j in range(data.size):
        byte = data[j]
        if byte == 0:
            continue
        for e in range(min(8, numel - 8 * j)):
            if (byte >> uint8(e)) & uint8(1):
                if count < out.size:
                    out[count] = 8 * j + e
                count += 1
    return count


@compiled("b1(i8[::1], i8, i4[::1], u2[::1])")
def _split(indices, numel, counts, low):
    for i in range(indices.size):
        at = indices[i]
        if at < 0 or at >= numel:
            return False
        counts[at >> 16] += 1
        low[i] = np.uint16(at & 0xFFFF)
    return True


@compiled("b1(i4[::1], u2[::1], i8[::1])")
def _join(counts, low, out):
    at = 0
    for b in range(counts.size):
        stop = at + np.int64(counts[b])
        if stop < at or stop > low.size:
            return False
        for i in range(at, stop):
            out[i] = (b << 16) + np.int64(low[i])
        at = stop
    return at == low.size
