"""Numbers in fewer bits on a GPU, in Triton; `bits` defines them. Tested with TRITON_INTERPRET=1.

Divisions are rounded as the CPU rounds them, so that codes are the same bits on every device.
Positions by blocks of 65,536 and Golomb-Rice codes are scans, searches and scattered writes, which
torch has; they run as in `bits` and `rice`. Decoders of positions make the host wait for the
device: what came over the wire is checked before it is used.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels import bits as reference
from thinwire.kernels.bits import bitmap_decode, block_decode, block_encode

__all__ = [
    "bitmap_decode", "bitmap_encode", "block_decode", "block_encode", "int8_encode", "pack",
    "scaled", "sign_encode", "unpack",
]  # fmt: skip
B = 1024


@triton.jit
def _pack(codes, n, out, bytes_, BITS: tl.constexpr, EACH: tl.constexpr, B: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    lane = tl.arange(0, EACH)
    place = at[:, None] * EACH + lane[None, :]
    code = tl.load(codes + place, mask=place < n, other=0).to(tl.int32)
    byte = tl.sum(code << (BITS * lane)[None, :], axis=1)
    tl.store(out + at, byte.to(tl.uint8), mask=at < bytes_)


@triton.jit
def _unpack(data, n, out, BITS: tl.constexpr, EACH: tl.constexpr, B: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    byte = tl.load(data + at // EACH, mask=at < n, other=0).to(tl.int32)
    code = (byte >> (BITS * (at % EACH)).to(tl.int32)) & ((1 << BITS) - 1)
    tl.store(out + at, code.to(tl.uint8), mask=at < n)


@triton.jit
def _block(x, n, block, B: tl.constexpr):
    """This program's block of numbers: where, which of them, and the bits of the largest."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, B)
    at = row * block + column
    inside = (column < block) & (at < n)
    value = tl.load(x + at, mask=inside, other=0.0)
    top = tl.max(value.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    return row, at, inside, value, top, top >= 0x7F800000


@triton.jit
def _int8(x, n, block, scale, codes, B: tl.constexpr):
    row, at, inside, value, top, broken = _block(x, n, block, B)
    step = tl.div_rn(top.to(tl.float32, bitcast=True), 127.0)
    share = tl.div_rn(value, tl.where(step == 0.0, 1.0, step))
    near = (share + 12582912.0) - 12582912.0  # to the nearest whole number, of two the even
    near = tl.minimum(tl.maximum(near, -127.0), 127.0)
    code = tl.where(broken, 0, tl.where(broken, 0.0, near).to(tl.int32))
    tl.store(scale + row, tl.where(broken, float("nan"), step))
    tl.store(codes + at, code.to(tl.int8), mask=inside)


@triton.jit
def _means(x, n, block, scale, B: tl.constexpr):
    row, _, inside, value, top, broken = _block(x, n, block, B)
    largest = tl.where(broken, 1.0, top.to(tl.float32, bitcast=True))
    unit = tl.abs(value) / tl.where(largest == 0.0, 1.0, largest)
    mean = tl.sum(unit) / tl.sum(inside.to(tl.float32))
    tl.store(scale + row, tl.where(broken, float("nan"), largest * mean))


@triton.jit
def _scaled(codes, scale, n, block, out, largest, B: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    code = tl.load(codes + at, mask=at < n, other=0).to(tl.float32)
    value = code * tl.load(scale + at // block, mask=at < n, other=0.0)
    inside = tl.minimum(tl.maximum(value, -largest), largest)
    tl.store(out + at, tl.where(value == value, inside, value), mask=at < n)


@triton.jit
def _marked(indices, k, words, B: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    place = tl.load(indices + at, mask=at < k, other=0)
    bit = (1 << (place % 32)).to(tl.int32)
    tl.atomic_or(words + place // 32, bit, mask=at < k)


def pack(codes: Tensor, bits: int) -> Tensor:
    """See `bits.pack`."""
    if bits == 8:
        return codes
    size = -(-codes.numel() * bits // 8)
    out = torch.empty(size, dtype=torch.uint8, device=codes.device)
    if size:
        _pack[(triton.cdiv(size, B),)](
            codes.contiguous(), codes.numel(), out, size, BITS=bits, EACH=8 // bits, B=B
        )
    return out


def unpack(data: Tensor, bits: int, n: int) -> Tensor:
    """See `bits.unpack`."""
    if bits == 8:
        return data
    out = torch.empty(n, dtype=torch.uint8, device=data.device)
    if n:
        _unpack[(triton.cdiv(n, B),)](data.contiguous(), n, out, BITS=bits, EACH=8 // bits, B=B)
    return out


def int8_encode(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """See `bits.int8_encode`."""
    blocks = -(-x.numel() // block)
    scale = torch.empty(blocks, dtype=torch.float32, device=x.device)
    codes = torch.empty(x.numel(), dtype=torch.int8, device=x.device)
    if blocks:
        _int8[(blocks,)](x, x.numel(), block, scale, codes, B=triton.next_power_of_2(block))
    return scale, codes


def sign_encode(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """See `bits.sign_encode`."""
    blocks = -(-x.numel() // block)
    scale = torch.empty(blocks, dtype=torch.float32, device=x.device)
    if blocks:
        _means[(blocks,)](x, x.numel(), block, scale, B=triton.next_power_of_2(block))
    return scale, pack((x >= 0).view(torch.uint8), 1)


def scaled(codes: Tensor, scale: Tensor, block: int) -> Tensor:
    """See `bits.scaled`."""
    out = torch.empty(codes.numel(), dtype=torch.float32, device=codes.device)
    if codes.numel():
        _scaled[(triton.cdiv(codes.numel(), B),)](
            codes.contiguous(), scale, codes.numel(), block, out, reference.TOP, B=B
        )
    return out


def bitmap_encode(indices: Tensor, numel: int) -> Tensor:
    """See `bits.bitmap_encode`."""
    words = torch.zeros(-(-numel // 32), dtype=torch.int32, device=indices.device)
    if indices.numel():
        _marked[(triton.cdiv(indices.numel(), B),)](indices, indices.numel(), words, B=B)
    return words.view(torch.uint8)[: -(-numel // 8)]
