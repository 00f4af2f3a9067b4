"""Numbers in sixteen bits and fewer on a GPU, in Triton; `scales` defines them.

Tested with TRITON_INTERPRET=1; not timed by us. A block of numbers is held by one program.
Divisions are rounded as the CPU rounds them, random numbers are the same hashes of their places, so
that codes are the same bits on every device. Nothing here makes the host wait.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels import scales as reference
from thinwire.kernels.bits_gpu import pack
from thinwire.kernels.scales import BROKEN, TOP, TOP_FP8, TOP_HALF, WORD, Edges, blocks
from thinwire.kernels.scales import natural_decode as natural_decode  # a table and a look-up

B = 1024
NOTHING = -(2**15)  # the power of two of zero


@triton.jit
def _places(edges, B: tl.constexpr):
    """This program's block: which, where its numbers are, and which of these places it has."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.load(edges + row) + tl.arange(0, B)
    return row, at, at < tl.load(edges + row + 1)


@triton.jit
def _block(x, edges, B: tl.constexpr):
    """Its numbers too, and the largest magnitude."""
    row, at, inside = _places(edges, B)
    value = tl.load(x + at, mask=inside, other=0.0)
    top = tl.max(value.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    return row, at, inside, value, top.to(tl.float32, bitcast=True), top >= 0x7F800000


@triton.jit
def _mixed(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _drawn(place, low, high):
    """24 bits at random for every place."""
    return _mixed(_mixed(place.to(tl.uint32) ^ low.to(tl.uint32)) ^ high.to(tl.uint32)) >> 8


@triton.jit
def _half(x, n, power, codes, largest, B: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    value = tl.load(x + at, mask=at < n, other=0.0)
    held = tl.minimum(tl.maximum(value, -largest), largest)
    value = tl.where(tl.abs(value) < float("inf"), held, value)
    factor = ((tl.load(power) + 127) << 23).to(tl.float32, bitcast=True)
    tl.store(codes + at, (value * factor).to(tl.float16), mask=at < n)


@triton.jit
def _bf16(x, n, codes, B: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    bits = tl.load(x + at, mask=at < n, other=0.0).to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    code = tl.minimum((size + 0x7FFF + ((size >> 16) & 1)) >> 16, 0x7F7F)  # stays finite
    code = tl.where(size < 0x7F800000, code, tl.where(size == 0x7F800000, 0x7F80, 0x7FC0))
    tl.store(codes + at, (code | ((bits >> 16) & 0x8000)).to(tl.int16), mask=at < n)


@triton.jit
def _int8(x, edges, scale, codes, B: tl.constexpr):
    row, at, inside, value, top, broken = _block(x, edges, B)
    step = tl.div_rn(top, 127.0)
    share = tl.div_rn(value, tl.where(step == 0.0, 1.0, step))
    near = (share + 12582912.0) - 12582912.0  # to the nearest whole number, of two the even
    near = tl.minimum(tl.maximum(near, -127.0), 127.0)
    code = tl.where(broken, 0.0, near).to(tl.int32)
    tl.store(scale + row, tl.where(broken, float("nan"), step))
    tl.store(codes + at, code.to(tl.int8), mask=inside)


@triton.jit
def _fp8(x, edges, scale, codes, most, B: tl.constexpr):
    row, at, inside, value, top, broken = _block(x, edges, B)
    step = tl.div_rn(top, most)
    share = tl.div_rn(value, tl.where(step == 0.0, 1.0, step))
    share = tl.where(broken, 0.0, tl.minimum(tl.maximum(share, -most), most))
    bits = share.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    low = (tl.abs(share) + 16384.0).to(tl.int32, bitcast=True)  # ends with e4m3's smallest number
    code = tl.where(size < (121 << 23), low - (141 << 23), normal) | ((bits >> 24) & 0x80)
    tl.store(scale + row, tl.where(broken, float("nan"), step))
    tl.store(codes + at, tl.where(broken, 0, code).to(tl.uint8), mask=inside)


@triton.jit
def _means(x, edges, scale, B: tl.constexpr):
    row, _, inside, value, _, broken = _block(x, edges, B)
    total = tl.sum(tl.abs(value).to(tl.float64)) / tl.sum(inside.to(tl.float64))
    tl.store(scale + row, tl.where(broken, float("nan"), total.to(tl.float32)))


@triton.jit
def _two_means(x, edges, above, below, B: tl.constexpr):
    row, _, _, value, _, broken = _block(x, edges, B)
    wide = value.to(tl.float64)
    high = tl.sum(tl.where(value > 0, wide, 0.0))
    low = tl.sum(tl.where(value < 0, wide, 0.0))
    highs = tl.maximum(tl.sum((value > 0).to(tl.float64)), 1.0)
    lows = tl.maximum(tl.sum((value < 0).to(tl.float64)), 1.0)
    tl.store(above + row, tl.where(broken, float("nan"), (high / highs).to(tl.float32)))
    tl.store(below + row, tl.where(broken, float("nan"), (low / lows).to(tl.float32)))


@triton.jit
def _levels(
    x, edges, most, low, high, clip, scale, codes,
    LARGEST: tl.constexpr, CLIPPED: tl.constexpr, FITTED: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    row, at, inside, value, top, broken = _block(x, edges, B)
    unit = tl.where(broken, 0.0, tl.div_rn(value, tl.where(top == 0.0, 1.0, top)))
    size = tl.abs(unit)
    if CLIPPED:
        square = tl.sum(unit.to(tl.float64) * unit.to(tl.float64)) / tl.sum(inside.to(tl.float64))
        size = tl.minimum(size, (clip * tl.sqrt(square)).to(tl.float32))
    if LARGEST:
        norm = tl.max(size)
    else:
        norm = tl.sqrt(tl.sum(size.to(tl.float64) * size.to(tl.float64))).to(tl.float32)
    up = _drawn(at, low, high).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08  # 2 ** -24
    share = tl.div_rn(size, tl.where(norm == 0.0, 1.0, norm)) * most
    level = tl.minimum(tl.floor(share + up), most)
    level = tl.where(inside, tl.where(unit < 0, -level, tl.where(unit > 0, level, 0.0)), 0.0)
    step = tl.div_rn(norm, most)
    if FITTED:
        wide = level.to(tl.float64)
        square = tl.sum(wide * wide)
        along = tl.sum(unit.to(tl.float64) * wide)
        step = (along / tl.where(square == 0.0, 1.0, square)).to(tl.float32)
    tl.store(scale + row, tl.where(broken, float("nan"), top * step))
    tl.store(codes + at, (level + most).to(tl.int32).to(tl.uint8), mask=inside)


@triton.jit
def _powers(
    x, n, low, high, power, top, NOTHING: tl.constexpr, BROKEN: tl.constexpr, B: tl.constexpr
):
    """The power of two of every number, at random up or down; the largest of all in `top`."""
    at = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    value = tl.load(x + at, mask=at < n, other=0.0)
    size = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    small = size < (1 << 23)  # made normal
    bits = (tl.abs(value) * tl.where(small, 18446744073709551616.0, 1.0)).to(tl.int32, bitcast=True)
    up = _drawn(at, low, high).to(tl.int32) < ((bits & 0x7FFFFF) << 1)
    exponent = (bits >> 23) - tl.where(small, 127 + 64, 127) + up.to(tl.int32)
    exponent = tl.where(size == 0, NOTHING, tl.minimum(exponent, 127))
    exponent = tl.where(size >= 0x7F800000, BROKEN, exponent)
    tl.atomic_max(top, tl.max(exponent))
    tl.store(power + at, exponent, mask=at < n)


@triton.jit
def _counted(x, n, power, top, codes, NOTHING: tl.constexpr, BROKEN: tl.constexpr, B: tl.constexpr):
    """Powers counted down from the largest, and signs."""
    at = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    negative = tl.load(x + at, mask=at < n, other=0.0) < 0
    most = tl.load(top)
    exponent = tl.load(power + at, mask=at < n, other=0)
    below = most - exponent
    there = (exponent > NOTHING) & (below < 127) & (most < BROKEN)
    code = tl.where(there, below + 1 + tl.where(negative, 128, 0), 0)
    tl.store(codes + at, code.to(tl.uint8), mask=at < n)


@triton.jit
def _scaled(codes, scale, edges, out, largest, B: tl.constexpr):
    row, at, inside = _places(edges, B)
    value = tl.load(codes + at, mask=inside, other=0).to(tl.float32) * tl.load(scale + row)
    held = tl.minimum(tl.maximum(value, -largest), largest)
    tl.store(out + at, tl.where(value == value, held, value), mask=inside)


@triton.jit
def _either(signs, above, below, edges, out, B: tl.constexpr):
    row, at, inside = _places(edges, B)
    sign = tl.load(signs + at, mask=inside, other=0)
    tl.store(out + at, tl.where(sign > 0, tl.load(above + row), tl.load(below + row)), mask=inside)


def half_encode(x: Tensor) -> tuple[Tensor, Tensor]:
    """See `scales.half_encode`."""
    power, codes = reference.half_power(x), torch.empty_like(x, dtype=torch.float16)
    if x.numel():
        _half[_grid(x)](x, x.numel(), power, codes, TOP_HALF, B=B)
    return power, codes


def bf16_encode(x: Tensor) -> Tensor:
    """See `scales.bf16_encode`."""
    codes = torch.empty_like(x, dtype=torch.int16)
    if x.numel():
        _bf16[_grid(x)](x, x.numel(), codes, B=B)
    return codes.view(torch.bfloat16)


def int8_encode(x: Tensor, block: int, edges: Edges = None) -> tuple[Tensor, Tensor]:
    """See `scales.int8_encode`."""
    (ends, scale), codes = _blocks(x, block, edges), torch.empty_like(x, dtype=torch.int8)
    if x.numel():
        _int8[scale.shape](x, ends, scale, codes, B=_wide(block))
    return scale, codes


def fp8_encode(x: Tensor, block: int, edges: Edges = None) -> tuple[Tensor, Tensor]:
    """See `scales.fp8_encode`."""
    (ends, scale), codes = _blocks(x, block, edges), torch.empty_like(x, dtype=torch.uint8)
    if x.numel():
        _fp8[scale.shape](x, ends, scale, codes, TOP_FP8, B=_wide(block))
    return scale, codes


def fp8_decode(codes: Tensor, scale: Tensor, block: int, edges: Edges = None) -> Tensor:
    """See `scales.fp8_decode`."""
    return scaled(codes.view(torch.float8_e4m3fn).to(torch.float32), scale, block, edges)


def sign_encode(x: Tensor, block: int, edges: Edges = None) -> tuple[Tensor, Tensor]:
    """See `scales.sign_encode`."""
    ends, scale = _blocks(x, block, edges)
    if x.numel():
        _means[scale.shape](x, ends, scale, B=_wide(block))
    return scale, pack((x >= 0).view(torch.uint8), 1)


def onebit_encode(x: Tensor, block: int, edges: Edges = None) -> tuple[Tensor, Tensor, Tensor]:
    """See `scales.onebit_encode`."""
    ends, above, below = _blocks(x, block, edges, 2)
    if x.numel():
        _two_means[above.shape](x, ends, above, below, B=_wide(block))
    return above, below, pack((x >= 0).view(torch.uint8), 1)


def either(signs: Tensor, above: Tensor, below: Tensor, block: int, edges: Edges = None) -> Tensor:
    """See `scales.either`."""
    ends, out = blocks(signs, block, edges), torch.empty_like(signs, dtype=torch.float32)
    if signs.numel():
        _either[above.shape](signs.contiguous(), above, below, ends, out, B=_wide(block))
    return out


def levels_encode(
    x: Tensor, block: int, levels: int, seed: int, edges: Edges = None,
    *, norm: str, clip: float | None, fitted: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See `scales.levels_encode`."""
    (ends, scale), codes = _blocks(x, block, edges), torch.empty_like(x, dtype=torch.uint8)
    if x.numel():
        _levels[scale.shape](
            x, ends, float(levels), seed & WORD, seed >> 32 & WORD, clip or 0.0, scale, codes,
            LARGEST=norm == "max", CLIPPED=clip is not None, FITTED=fitted, B=_wide(block),
        )  # fmt: skip
    return scale, codes


def natural_encode(x: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """See `scales.natural_encode`."""
    top = torch.full((1,), NOTHING, dtype=torch.int32, device=x.device)
    power, codes = torch.empty_like(x, dtype=torch.int32), torch.empty_like(x, dtype=torch.uint8)
    if x.numel():
        low, high = seed & WORD, seed >> 32 & WORD
        _powers[_grid(x)](x, x.numel(), low, high, power, top, NOTHING, BROKEN, B)
        _counted[_grid(x)](x, x.numel(), power, top, codes, NOTHING, BROKEN, B)
    return torch.where(top == NOTHING, 0, top), codes


def scaled(codes: Tensor, scale: Tensor, block: int, edges: Edges = None) -> Tensor:
    """See `scales.scaled`."""
    ends, out = blocks(codes, block, edges), torch.empty_like(codes, dtype=torch.float32)
    if codes.numel():
        _scaled[scale.shape](codes.contiguous(), scale, ends, out, TOP, B=_wide(block))
    return out


def _blocks(x: Tensor, block: int, edges: Edges, each: int = 1) -> tuple[Tensor, ...]:
    """Where blocks begin and end, and room for so many scales of each."""
    ends = blocks(x, block, edges)
    return ends, *torch.empty(each, len(ends) - 1, dtype=torch.float32, device=x.device)


def _grid(x: Tensor) -> tuple[int]:
    return (triton.cdiv(x.numel(), B),)


def _wide(block: int) -> int:
    return int(triton.next_power_of_2(block))
