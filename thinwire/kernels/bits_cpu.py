"""Codes and positions in few bits on the CPU, in Numba: one pass where `bits` takes several.

Packing, which works on the whole gradient, takes as many threads as torch has. Codes of positions
work on the few that were chosen, and take one.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from numba import njit, types, uint8
from torch import Tensor

from thinwire.kernels.bits import BLOCK
from thinwire.kernels.sparse import array, tensor
from thinwire.kernels.threads import in_blocks

_bytes, _longs = types.uint8[::1], types.int64[::1]
_halves, _counts = types.uint16[::1], types.int32[::1]
_long, _flag = types.int64, types.boolean
_compiled = partial(njit, nogil=True, cache=True, error_model="numpy")


def pack(codes: Tensor, bits: int) -> Tensor:
    """See `bits.pack`."""
    if bits == 8:
        return codes
    numbers, each = array(codes.contiguous()), 8 // bits
    out = np.zeros(-(-numbers.size // each), np.uint8)
    in_blocks(numbers.size, each, lambda some, of: _pack(numbers[of], bits, out[some]))
    return tensor(out)


def unpack(data: Tensor, bits: int, n: int) -> Tensor:
    """See `bits.unpack`."""
    if bits == 8:
        return data
    message, out = array(data.contiguous()), np.empty(n, np.uint8)
    in_blocks(n, 8 // bits, lambda some, of: _unpack(message[some], bits, out[of]))
    return tensor(out)


def bitmap_encode(indices: Tensor, numel: int) -> Tensor:
    """See `bits.bitmap_encode`."""
    out = np.zeros(-(-numel // 8), np.uint8)
    if not _marked(array(indices.contiguous()), numel, out):
        raise IndexError(f"indices outside the {numel} entries of the bitmap")
    return tensor(out)


def bitmap_decode(data: Tensor, k: int, numel: int) -> Tensor | None:
    """See `bits.bitmap_decode`."""
    out = np.empty(k, np.int64)
    return tensor(out) if _found(array(data.contiguous()), numel, out) == k else None


def block_encode(indices: Tensor, numel: int) -> tuple[Tensor, Tensor]:
    """See `bits.block_encode`."""
    counts = np.zeros(-(-numel // BLOCK), np.int32)
    low = np.empty(indices.numel(), np.uint16)
    if not _split(array(indices.contiguous()), numel, counts, low):
        raise IndexError(f"indices outside the {numel} entries of the bucket")
    return tensor(counts), tensor(low)


def block_decode(counts: Tensor, low: Tensor) -> Tensor | None:
    """See `bits.block_decode`."""
    out = np.empty(low.numel(), np.int64)
    return tensor(out) if _joined(array(counts), array(low), out) else None


@_compiled(types.void(_bytes, _long, _bytes))
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


@_compiled(types.void(_bytes, _long, _bytes))
def _unpack(data, bits, out):
    each, low = 8 // bits, uint8((1 << bits) - 1)
    whole = out.size // each
    for j in range(whole):
        for e in range(each):
            out[j * each + e] = (data[j] >> uint8(bits * e)) & low
    for i in range(whole * each, out.size):
        out[i] = (data[whole] >> uint8(bits * (i % each))) & low


@_compiled(_flag(_longs, _long, _bytes))
def _marked(indices, numel, out):
    for i in range(indices.size):
        at = indices[i]
        if at < 0 or at >= numel:
            return False
        out[at >> 3] |= uint8(1) << uint8(at & 7)
    return True


@_compiled(_long(_bytes, _long, _longs))
def _found(data, numel, out):
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


@_compiled(_flag(_longs, _long, _counts, _halves))
def _split(indices, numel, counts, low):
    for i in range(indices.size):
        at = indices[i]
        if at < 0 or at >= numel:
            return False
        counts[at >> 16] += 1
        low[i] = np.uint16(at & 0xFFFF)
    return True


@_compiled(_flag(_counts, _halves, _longs))
def _joined(counts, low, out):
    at = 0
    for b in range(counts.size):
        stop = at + np.int64(counts[b])
        if stop < at or stop > low.size:
            return False
        for i in range(at, stop):
            out[i] = (b << 16) + np.int64(low[i])
        at = stop
    return at == low.size
