"""Numbers in sixteen bits and fewer, in plain torch.

    half_encode, bf16_encode        sixteen bits a number; half's are times a power of two
    int8_encode, fp8_encode         eight bits and a scale a block; `scaled` and `fp8_decode` back
    levels_encode                   a few levels of a block's scale, at random or to the nearest
    sign_encode, onebit_encode      one bit and one or two means a block; `either` is onebit's back
    natural_encode, natural_decode  a sign and a power of two, rounded at random

Blocks have `block` entries, the last one what is left; or they are those between `edges`, none of
which may be longer. A block that holds a NaN or an infinity has the scale NaN and the codes of
zero. Sums inside a block are taken in double precision, so that the order in which a kernel
adds up hardly ever shows. Random numbers are hashes of a seed and a place: the same on any device,
in any number of parts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.kernels.reference.bits import pack

TOP = torch.finfo(torch.float32).max
TOP_BF16 = torch.finfo(torch.bfloat16).max
TOP_FP8 = 448.0  # of e4m3
TOP_HALF = (2 - 2**-10) * 2.0**127  # single precision with an 11-bit mantissa
POWER_HALF = 15  # numbers below 2^15 do not overflow half when they are rounded
BROKEN = 2**30  # the power of two that stands for numbers among which one is not finite
WORD = 0xFFFFFFFF
Room = tuple[Tensor, Tensor] | None  # where scales and codes are to be written; new if None
Edges = Tensor | None  # (blocks + 1,) int64: where blocks begin and end, from 0 to n


def half_encode(
    x: Tensor, /, codes: Tensor | None = None
) -> tuple[Tensor, Tensor]:  # (n,) -> (1,) int32, (n,) float16
    """The power of two with which the largest magnitude just fits, and the numbers times it."""
    power = find_power(x)
    below = torch.where(x.isinf(), x, x.clamp(-TOP_HALF, TOP_HALF))
    return power, place((below * torch.exp2(power.to(x.dtype))).to(torch.float16), codes)


def half_decode(
    codes: Tensor, /, power: int, dtype: torch.dtype, out: Tensor | None = None,
    alpha: float | None = None,
) -> Tensor:  # (n,) -> (n,)  # fmt: skip
    """The numbers that were multiplied by 2^power; new, or placed in `out`."""
    return place(codes.to(dtype, copy=True).mul_(2.0**-power), out, alpha)


def find_power(x: Tensor) -> Tensor:  # (n,) -> (1,) int32
    """The power of two with which the largest magnitude just fits into half; 0 if it is none."""
    largest = find_largest(x.reshape(1, -1))[0]
    exponent = torch.frexp(largest).exponent
    fits = torch.where(largest.isfinite() & (largest > 0), POWER_HALF - exponent, 0)
    return fits.clamp(-126, 126).to(torch.int32)


def bf16_encode(x: Tensor, /, codes: Tensor | None = None) -> Tensor:  # (n,) -> (n,) bfloat16
    """The nearest; a finite number stays finite."""
    near = torch.where(x.isinf(), x, x.clamp(-TOP_BF16, TOP_BF16)).to(torch.bfloat16)
    return place(near, codes)


def bf16_decode(
    codes: Tensor, /, dtype: torch.dtype, out: Tensor | None = None, alpha: float | None = None
) -> Tensor:  # (n,) -> (n,)
    """The numbers; new, or placed in `out`."""
    return place(codes.to(dtype), out, alpha)


def int8_encode(
    x: Tensor, /, block: int, edges: Edges = None, into: Room = None
) -> tuple[Tensor, Tensor]:  # (n,) -> (blocks,), (n,)
    """A scale for every block, and the nearest whole multiples of it, -127 to 127."""
    rows, where, _ = cut_blocks(x, block, edges)
    scale = find_largest(rows) / 127
    codes = (rows / avoid_zero(scale)).round_().nan_to_num_(0.0).clamp_(-127, 127)
    return put(hold(scale), codes.to(torch.int8).view(-1)[where], into)


def fp8_encode(
    x: Tensor, /, block: int, edges: Edges = None, into: Room = None
) -> tuple[Tensor, Tensor]:  # (n,) -> (blocks,), (n,) uint8
    """A scale for every block, and the nearest e4m3 multiples of it."""
    rows, where, _ = cut_blocks(x, block, edges)
    scale = find_largest(rows) / TOP_FP8
    small = (rows / avoid_zero(scale)).clamp_(-TOP_FP8, TOP_FP8)
    small = torch.where(scale.isfinite(), small, 0.0)
    codes = small.to(torch.float8_e4m3fn).view(torch.uint8).view(-1)[where]
    return put(hold(scale), codes, into)


def fp8_decode(
    codes: Tensor, scale: Tensor, /, block: int, edges: Edges = None, out: Tensor | None = None,
    alpha: float | None = None,
) -> Tensor:  # (n,), (blocks,) -> (n,)  # fmt: skip
    """The numbers that the codes stand for, in the precision of their scales; see `scaled`."""
    small = codes.view(torch.float8_e4m3fn).to(scale.dtype)
    return scaled(small, scale, block, edges, out, alpha)


def sign_encode(
    x: Tensor, /, block: int, edges: Edges = None
) -> tuple[Tensor, Tensor]:  # (n,) -> (blocks,), bytes
    """The mean magnitude of every block, and a bit for every number that is at least zero."""
    rows, _, sizes = cut_blocks(x, block, edges)
    scale = _add_up(rows.abs()) / sizes
    return hold(scale), pack((x >= 0).to(torch.uint8), 1)


def onebit_encode(x: Tensor, /, block: int, edges: Edges = None) -> tuple[Tensor, Tensor, Tensor]:
    """The means of a block's positive and of its negative numbers, and the bits of the signs."""
    rows = cut_blocks(x, block, edges)[0]
    broken = torch.where(rows.isfinite().all(1, keepdim=True), 0.0, float("nan"))

    def mean(there: Tensor) -> Tensor:
        total = _add_up(torch.where(there, rows, 0.0))
        return hold(total / there.sum(1, keepdim=True).clamp(min=1) + broken)

    return mean(rows > 0), mean(rows < 0), pack((x >= 0).to(torch.uint8), 1)


def either(
    signs: Tensor, above: Tensor, below: Tensor, /, block: int, edges: Edges = None
) -> Tensor:
    """The one number of its block where the code is 1, the other where it is 0."""
    which = find_block(find_edges(signs, block, edges), signs.numel())
    return torch.where(signs > 0, above[which], below[which])


def levels_encode(
    x: Tensor, /, block: int, levels: int, seed: int | None, edges: Edges = None,
    *, norm: str, clip: float | None, fitted: bool,
) -> tuple[Tensor, Tensor]:  # (n,) -> (blocks,), (n,) uint8  # fmt: skip
    """A scale for every block, and whole multiples of it, from 0 for -levels: rounded at random, or
    to the nearest without a seed.

    Numbers are first held at `clip` root mean squares. The scale is the norm (`"l2"`) or the
    largest magnitude (`"max"`) over the levels; if `fitted`, the least-squares one of these codes.
    """
    rows, where, sizes = cut_blocks(x, block, edges)
    top = find_largest(rows)
    unit = rows / avoid_zero(top)  # within -1 and 1: squares neither overflow nor vanish
    clipped = unit
    if clip is not None:
        square = _add_up(unit.double().square()) / sizes
        limit = (clip * square.sqrt()).to(x.dtype)
        clipped = unit.clamp(-limit, limit)
    wide = clipped.double()
    scale = find_largest(clipped) if norm == "max" else _add_up(wide.square()).sqrt().to(x.dtype)
    share = clipped.abs() / avoid_zero(scale) * levels
    draw: float | Tensor = 0.5
    if seed is not None:
        draw = cut_blocks(draw_uniform(x.numel(), seed, x.device), block, edges)[0]
    codes = (share + draw).floor_().clamp_(max=levels) * unit.sign()
    step = scale / levels
    if fitted:
        square = _add_up(codes.double().square())
        step = (_add_up(unit.double() * codes) / avoid_zero(square)).to(x.dtype)
    kept = torch.where(top.isfinite(), codes, 0.0).view(-1)[where]
    return hold(top * step), (kept + levels).to(torch.uint8)


def natural_encode(x: Tensor, /, seed: int) -> tuple[Tensor, Tensor]:  # (n,) -> (1,) int32, (n,)
    """The largest power of two, and signs and powers counted down from it; 0 is zero."""
    whole = bool(x.isfinite().all())
    mantissa, power = torch.frexp(x.double().abs())  # |x| = mantissa * 2^power, below 2^power
    up = draw_uniform(x.numel(), seed, x.device) < 2 * mantissa - 1
    power = (power - 1 + up.to(power.dtype)).clamp(max=127)
    there = x != 0
    top = power[there].max() if whole and bool(there.any()) else power.new_tensor(0)
    below = top - power
    code = torch.where(there & (below < 127), below + 1, 0)
    code = code + 128 * ((x < 0) & (code > 0))
    if not whole:
        top, code = power.new_tensor(BROKEN), torch.zeros_like(code)
    return top.reshape(1).to(torch.int32), code.to(torch.uint8)


def natural_decode(codes: Tensor, /, top: int, dtype: torch.dtype) -> Tensor:  # (n,) -> (n,)
    """The powers of two that the codes stand for; `top` is the largest."""
    return list_powers(top).to(dtype).to(codes.device)[codes.to(torch.int64)]


def list_powers(top: int) -> Tensor:  # (256,)
    """What every code of `natural_encode` stands for."""
    code = torch.arange(128, dtype=torch.float64)
    size = torch.where(code > 0, torch.exp2(top + 1 - code), 0.0)
    return torch.cat([size, -size])


def scaled(
    codes: Tensor, scale: Tensor, block: int, edges: Edges = None, out: Tensor | None = None,
    alpha: float | None = None,
) -> Tensor:  # (n,), (blocks,) -> (n,)  # fmt: skip
    """Codes times their block's scale, new or placed in `out`; rounding up past the largest number
    stops there."""
    top = torch.finfo(scale.dtype).max
    values = (
        codes.to(scale.dtype) * scale[find_block(find_edges(codes, block, edges), codes.numel())]
    )
    return place(values.clamp_(-top, top), out, alpha)


def place(values: Tensor, out: Tensor | None = None, alpha: float | None = None) -> Tensor:
    """The values as they are; or in place of what `out` holds, or alpha times them added to it."""
    if out is None:
        return values
    return out.copy_(values) if alpha is None else out.add_(values * alpha)


def put(scale: Tensor, codes: Tensor, into: Room) -> tuple[Tensor, Tensor]:
    """Both as they are, or copied into the room there is for them."""
    return (scale, codes) if into is None else (into[0].copy_(scale), into[1].copy_(codes))


def draw_uniform(n: int, seed: int, device: torch.device | str = "cpu") -> Tensor:  # (n,) float32
    """Numbers in [0, 1) with 24 bits, the i-th a hash of i and the 64 bits of the seed."""
    place = torch.arange(n, device=device) & WORD
    bits = _mix(_mix(place ^ (seed & WORD)) ^ (seed >> 32 & WORD))
    return (bits >> 8).to(torch.float32) * 2.0**-24


def _mix(x: Tensor) -> Tensor:
    """Every bit of 32 depends on every other (C. Wellons's lowbias32, in the public domain)."""
    x = (x ^ (x >> 16)) * 0x7FEB352D & WORD
    x = (x ^ (x >> 15)) * 0x846CA68B & WORD
    return x ^ (x >> 16)


def find_largest(rows: Tensor) -> Tensor:  # (b, block) -> (b, 1)
    """The largest magnitude of every row; NaN wins."""
    return rows.abs().amax(dim=1, keepdim=True) if rows.numel() else rows.new_zeros(len(rows), 1)


def avoid_zero(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, 1.0, scale)


def hold(scale: Tensor) -> Tensor:  # (b, 1) -> (b,)
    """Scales in single precision; one that is not finite becomes NaN, and its block with it."""
    inside = torch.where(scale.isfinite(), scale.clamp(-TOP, TOP), float("nan"))
    return inside.reshape(-1).to(torch.float32)


def find_edges(x: Tensor, block: int, edges: Edges = None) -> Tensor:  # (n,) -> (blocks + 1,)
    """Where blocks begin and end."""
    if edges is not None:
        return edges
    n = x.numel()
    return torch.arange(0, n + block, block, device=x.device)[: -(-n // block) + 1].clamp_(max=n)


def find_block(edges: Tensor, n: int) -> Tensor:  # (blocks + 1,) -> (n,)
    """Which block every entry is in."""
    every = torch.arange(len(edges) - 1, device=edges.device)
    return every.repeat_interleave(edges.diff(), output_size=n)


def cut_blocks(x: Tensor, block: int, edges: Edges = None) -> tuple[Tensor, Tensor, Tensor]:
    """A block a row, filled up with zeros (b, block); where each entry is (n,); sizes (b, 1).

    Sizes, because filling must not pull a mean down.
    """
    edges = find_edges(x, block, edges)
    which = find_block(edges, x.numel())
    place = which * block + torch.arange(x.numel(), device=x.device) - edges[which]
    rows = x.new_zeros(len(edges) - 1, block)
    rows.view(-1)[place] = x
    return rows, place, edges.diff()[:, None]


def _add_up(rows: Tensor) -> Tensor:  # (b, block) -> (b, 1) in double precision
    return rows.sum(dim=1, keepdim=True, dtype=torch.float64)
