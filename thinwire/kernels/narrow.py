"""Numbers and positions in fewer bits on the CPU, in Numba: one pass where `bits` takes several.

Everything equals the reference to the bit, but for the mean magnitude of a block, which adds up in
another order; it travels with the message, so that all ranks read the same.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from numba import njit, types, uint8, uint32
from torch import Tensor

from thinwire.kernels import bits as reference
from thinwire.kernels.bits import BLOCK
from thinwire.kernels.lanes import INFINITE, MASK
from thinwire.kernels.sparse import array, tensor

TOP = np.float32(reference.TOP)
_floats, _bytes, _signed = types.float32[::1], types.uint8[::1], types.int8[::1]
_words, _halves, _counts, _longs = (
    types.uint32[::1], types.uint16[::1], types.int32[::1], types.int64[::1],
)  # fmt: skip
_long, _flag = types.int64, types.boolean
_compiled = partial(njit, nogil=True, cache=True, error_model="numpy", fastmath={"reassoc"})


def pack(codes: Tensor, bits: int) -> Tensor:
    """See `bits.pack`."""
    if bits == 8:
        return codes
    out = np.zeros(-(-codes.numel() * bits // 8), np.uint8)
    _pack(array(codes.contiguous()), bits, out)
    return tensor(out)


def unpack(data: Tensor, bits: int, n: int) -> Tensor:
    """See `bits.unpack`."""
    if bits == 8:
        return data
    out = np.empty(n, np.uint8)
    _unpack(array(data.contiguous()), bits, out)
    return tensor(out)


def int8_encode(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """See `bits.int8_encode`."""
    numbers, scale = array(x), np.empty(-(-x.numel() // block), np.float32)
    codes = np.empty(x.numel(), np.int8)
    _int8(numbers, numbers.view(np.uint32), block, scale, scale.view(np.uint32), codes)
    return tensor(scale), tensor(codes)


def sign_encode(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """See `bits.sign_encode`."""
    scale = np.empty(-(-x.numel() // block), np.float32)
    _means(array(x), block, scale)
    return tensor(scale), pack((x >= 0).view(torch.uint8), 1)


def scaled(codes: Tensor, scale: Tensor, block: int) -> Tensor:
    """See `bits.scaled`."""
    if codes.dtype != torch.int8:
        return reference.scaled(codes, scale, block)
    out = np.empty(codes.numel(), np.float32)
    _scaled(array(codes.contiguous()), array(scale.contiguous()), block, out)
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


@_compiled(types.void(_floats, _words, _long, _floats, _words, _signed))
def _int8(x, bits, block, scale, scale_bits, codes):
    for b in range(scale.size):
        start, stop = b * block, min(x.size, (b + 1) * block)
        top = uint32(0)
        for i in range(start, stop):
            top = max(top, bits[i] & uint32(MASK))
        if top >= uint32(INFINITE):
            scale[b] = np.nan
            codes[start:stop] = 0
            continue
        scale_bits[b] = top
        scale[b] /= np.float32(127)
        over = scale[b] if scale[b] != 0 else np.float32(1)
        for i in range(start, stop):
            near = np.rint(x[i] / over)
            codes[i] = np.int8(min(max(near, np.float32(-127)), np.float32(127)))


@_compiled(types.void(_floats, _long, _floats))
def _means(x, block, scale):
    for b in range(scale.size):
        start, stop = b * block, min(x.size, (b + 1) * block)
        total = 0.0
        for i in range(start, stop):
            total += abs(np.float64(x[i]))
        mean = total / (stop - start)
        scale[b] = np.float32(mean) if np.isfinite(mean) else np.float32(np.nan)


@_compiled(types.void(_signed, _floats, _long, _floats))
def _scaled(codes, scale, block, out):
    for b in range(scale.size):
        step = scale[b]
        start, stop = b * block, min(out.size, (b + 1) * block)
        for i in range(start, stop):
            out[i] = np.float32(codes[i]) * step
        if abs(step) > TOP / np.float32(128):  # few blocks are so large; NaN stays
            for i in range(start, stop):
                out[i] = min(max(out[i], -TOP), TOP)


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
