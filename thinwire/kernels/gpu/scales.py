"""Numbers in eight bits and fewer, in Triton: codes that need a look at a whole block first.

A block of numbers is held by one program.
Divisions are rounded as the CPU rounds them, random numbers are the same hashes of their places, so
that codes are the same bits on every device. Nothing here makes the host wait.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels.reference import scales as reference
from thinwire.kernels.reference.scales import TOP, TOP_FP8, WORD, Edges, Room, find_edges


@triton.jit
def _find_places(edges, B: tl.constexpr):
    """This program's block: which, where its numbers are, and which of these places it has."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.load(edges + row) + tl.arange(0, B)
    return row, at, at < tl.load(edges + row + 1)


@triton.jit
def _load_block(x, edges, B: tl.constexpr):
    """Its numbers too, and the largest magnitude."""
    row, at, inside = _find_places(edges, B)
    value = tl.load(x + at, mask=inside, other=0.0)
    top = tl.max(value.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    return row, at, inside, value, top.to(tl.float32, bitcast=True), top >= 0x7F800000


@triton.jit
def _mix(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _draw(place, low, high):
    """24 bits at random for every place."""
    return _mix(_mix(place.to(tl.uint32) ^ low.to(tl.uint32)) ^ high.to(tl.uint32)) >> 8


@triton.jit
def _round_int8(x, edges, scale, codes, B: tl.constexpr):
    row, at, inside, value, top, broken = _load_block(x, edges, B)
    step = tl.div_rn(top, 127.0)
    share = tl.div_rn(value, tl.where(step == 0.0, 1.0, step))
    near = (share + 12582912.0) - 12582912.0  # to the nearest whole number, of two the even
    near = tl.minimum(tl.maximum(near, -127.0), 127.0)
    code = tl.where(broken, 0.0, near).to(tl.int32)
    tl.store(scale + row, tl.where(broken, float("nan"), step))
    tl.store(codes + at, code.to(tl.int8), mask=inside)


@triton.jit
def _round_fp8(x, edges, scale, codes, most, B: tl.constexpr):
    row, at, inside, value, top, broken = _load_block(x, edges, B)
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
def _round_levels(
    x, edges, most, low, high, clip, scale, codes,
    NEAREST: tl.constexpr, LARGEST: tl.constexpr, CLIPPED: tl.constexpr, FITTED: tl.constexpr,
    B: tl.constexpr,
):  # fmt: skip
    row, at, inside, value, top, broken = _load_block(x, edges, B)
    unit = tl.where(broken, 0.0, tl.div_rn(value, tl.where(top == 0.0, 1.0, top)))
    size = tl.abs(unit)
    if CLIPPED:
        square = tl.sum(unit.to(tl.float64) * unit.to(tl.float64)) / tl.sum(inside.to(tl.float64))
        size = tl.minimum(size, (clip * tl.sqrt(square)).to(tl.float32))
    if LARGEST:
        norm = tl.max(size)
    else:
        norm = tl.sqrt(tl.sum(size.to(tl.float64) * size.to(tl.float64))).to(tl.float32)
    if NEAREST:
        up = 0.5
    else:
        up = _draw(at, low, high).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08  # 2 ** -24
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
def _multiply(codes, scale, edges, out, largest, B: tl.constexpr):
    row, at, inside = _find_places(edges, B)
    value = tl.load(codes + at, mask=inside, other=0).to(tl.float32) * tl.load(scale + row)
    held = tl.minimum(tl.maximum(value, -largest), largest)
    tl.store(out + at, tl.where(value == value, held, value), mask=inside)


def int8_encode(
    x: Tensor, block: int, edges: Edges = None, into: Room = None
) -> tuple[Tensor, Tensor]:
    ends, scale, codes = _make_room(x, block, edges, torch.int8, into)
    _launch(_round_int8, block, scale, x, ends, scale, codes)
    return scale, codes


def fp8_encode(
    x: Tensor, block: int, edges: Edges = None, into: Room = None
) -> tuple[Tensor, Tensor]:
    ends, scale, codes = _make_room(x, block, edges, torch.uint8, into)
    _launch(_round_fp8, block, scale, x, ends, scale, codes, TOP_FP8)
    return scale, codes


def fp8_decode(
    codes: Tensor, scale: Tensor, block: int, edges: Edges = None, out: Tensor | None = None,
    alpha: float | None = None,
) -> Tensor:  # fmt: skip
    small = codes.view(torch.float8_e4m3fn).to(torch.float32)
    return scaled(small, scale, block, edges, out, alpha)


def levels_encode(
    x: Tensor, block: int, levels: int, seed: int | None, edges: Edges = None,
    *, norm: str, clip: float | None, fitted: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    (ends, scale), codes = _split(x, block, edges), torch.empty_like(x, dtype=torch.uint8)
    _launch(
        _round_levels, block, scale, x, ends, float(levels), (seed or 0) & WORD,
        (seed or 0) >> 32 & WORD, clip or 0.0, scale, codes, NEAREST=seed is None,
        LARGEST=norm == "max", CLIPPED=clip is not None, FITTED=fitted,
    )  # fmt: skip
    return scale, codes


def scaled(
    codes: Tensor, scale: Tensor, block: int, edges: Edges = None, out: Tensor | None = None,
    alpha: float | None = None,
) -> Tensor:  # fmt: skip
    fresh = out is None or alpha is not None
    values = torch.empty_like(codes, dtype=torch.float32) if out is None or fresh else out
    ends = find_edges(codes, block, edges)
    _launch(_multiply, block, scale, codes.contiguous(), scale, ends, values, TOP)
    return reference.place(values, out, alpha) if fresh else values


def _make_room(
    x: Tensor, block: int, edges: Edges, kind: torch.dtype, into: Room
) -> tuple[Tensor, Tensor, Tensor]:
    """Where blocks begin and end, and where their scales and codes go."""
    ends, scale = _split(x, block, edges)
    return ends, *((scale, torch.empty_like(x, dtype=kind)) if into is None else into)


def _split(x: Tensor, block: int, edges: Edges) -> tuple[Tensor, Tensor]:
    """Where blocks begin and end, and room for a scale of each."""
    ends = find_edges(x, block, edges)
    return ends, torch.empty(len(ends) - 1, dtype=torch.float32, device=x.device)


def _launch(kernel: Any, block: int, scale: Tensor, *args: Any, **constants: Any) -> None:
    """A program for every block."""
    if scale.numel():
        kernel[scale.shape](*args, **constants, B=triton.next_power_of_2(block))
