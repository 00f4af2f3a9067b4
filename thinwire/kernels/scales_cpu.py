"""Numbers in sixteen bits and fewer on the CPU: tensors in and out, `scales_loops` does the work.

Codes equal the reference's to the bit. Parts of the work go to as many threads as torch has.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from thinwire.kernels import scales as reference
from thinwire.kernels import scales_loops as loops
from thinwire.kernels.bits_cpu import pack
from thinwire.kernels.lanes import INFINITE
from thinwire.kernels.scales import BROKEN, POWER_HALF, WORD, Edges, powers
from thinwire.kernels.sparse import Array, array, tensor
from thinwire.kernels.threads import between, in_parts


def half_encode(x: Tensor) -> tuple[Tensor, Tensor]:
    """See `scales.half_encode`."""
    numbers, codes = array(x), np.empty(x.numel(), np.uint16)
    bits = numbers.view(np.uint32)
    top = max(in_parts(bits.size, lambda start, stop: int(loops.largest(bits[start:stop]))))
    power = 0
    if 0 < top < INFINITE:
        power = POWER_HALF - math.frexp(float(np.uint32(top).view(np.float32)))[1]
        power = min(126, max(-126, power))
    factor = np.float32(2.0**power)
    in_parts(
        bits.size, lambda start, stop: loops.half(numbers[start:stop], factor, codes[start:stop])
    )
    return torch.tensor([power], dtype=torch.int32), tensor(codes).view(torch.float16)


def bf16_encode(x: Tensor) -> Tensor:
    """See `scales.bf16_encode`."""
    bits, codes = array(x).view(np.uint32), np.empty(x.numel(), np.uint16)
    in_parts(bits.size, lambda start, stop: loops.bf16(bits[start:stop], codes[start:stop]))
    return tensor(codes).view(torch.bfloat16)


def int8_encode(x: Tensor, block: int, edges: Edges = None) -> tuple[Tensor, Tensor]:
    """See `scales.int8_encode`."""
    numbers, ends, scale = array(x), *_blocks(x, block, edges)
    codes = np.empty(x.numel(), np.int8)
    between(ends, lambda some, of: loops.int8(numbers, of, scale[some], codes))
    return tensor(scale), tensor(codes)


def fp8_encode(x: Tensor, block: int, edges: Edges = None) -> tuple[Tensor, Tensor]:
    """See `scales.fp8_encode`."""
    numbers, ends, scale = array(x), *_blocks(x, block, edges)
    codes = np.empty(x.numel(), np.uint8)
    between(ends, lambda some, of: loops.fp8(numbers, of, scale[some], codes))
    return tensor(scale), tensor(codes)


def fp8_decode(codes: Tensor, scale: Tensor, block: int, edges: Edges = None) -> Tensor:
    """See `scales.fp8_decode`."""
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    return scaled(_looked_up(codes, every.to(torch.float32)), scale, block, edges)


def sign_encode(x: Tensor, block: int, edges: Edges = None) -> tuple[Tensor, Tensor]:
    """See `scales.sign_encode`."""
    numbers, ends, scale = array(x), *_blocks(x, block, edges)
    between(ends, lambda some, of: loops.means(numbers, of, scale[some]))
    return tensor(scale), pack((x >= 0).view(torch.uint8), 1)


def onebit_encode(x: Tensor, block: int, edges: Edges = None) -> tuple[Tensor, Tensor, Tensor]:
    """See `scales.onebit_encode`."""
    numbers, ends, above, below = array(x), *_blocks(x, block, edges, 2)
    between(ends, lambda some, of: loops.two_means(numbers, of, above[some], below[some]))
    return tensor(above), tensor(below), pack((x >= 0).view(torch.uint8), 1)


def either(signs: Tensor, above: Tensor, below: Tensor, block: int, edges: Edges = None) -> Tensor:
    """See `scales.either`."""
    given, out = array(signs.contiguous()), np.empty(signs.numel(), np.float32)
    high, low = array(above.contiguous()), array(below.contiguous())
    ends = array(reference.blocks(signs, block, edges))
    between(ends, lambda some, of: loops.either(given, high[some], low[some], of, out))
    return tensor(out)


def levels_encode(
    x: Tensor, block: int, levels: int, seed: int, edges: Edges = None,
    *, norm: str, clip: float | None, fitted: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See `scales.levels_encode`."""
    numbers, ends, scale = array(x), *_blocks(x, block, edges)
    codes = np.empty(x.numel(), np.uint8)
    low, high = _halves(seed)
    limit = math.inf if clip is None else float(clip)

    def part(some: slice, of: Array) -> None:
        loops.levels(
            numbers, of, np.float32(levels), low, high, norm == "max", limit, fitted, scale[some],
            codes,
        )  # fmt: skip

    between(ends, part)
    return tensor(scale), tensor(codes)


def natural_encode(x: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """See `scales.natural_encode`."""
    numbers, power = array(x), np.empty(x.numel(), np.int16)
    bits = numbers.view(np.uint32)
    codes = np.zeros(x.numel(), np.uint8)
    low, high = _halves(seed)

    def first(start: int, stop: int) -> int:
        return int(loops.powers(numbers[start:stop], low, high, start, power[start:stop]))

    def second(start: int, stop: int) -> None:
        loops.counted(bits[start:stop], power[start:stop], top, codes[start:stop])

    top = max(in_parts(bits.size, first))
    if top < BROKEN:
        top = top if top > loops.NOTHING else 0
        in_parts(bits.size, second)
    return torch.tensor([top], dtype=torch.int32), tensor(codes)


def natural_decode(codes: Tensor, top: int, dtype: torch.dtype) -> Tensor:
    """See `scales.natural_decode`."""
    if dtype != torch.float32:
        return reference.natural_decode(codes, top, dtype)
    return _looked_up(codes, powers(top).to(torch.float32))


def scaled(codes: Tensor, scale: Tensor, block: int, edges: Edges = None) -> Tensor:
    """See `scales.scaled`."""
    if codes.dtype not in (torch.int8, torch.float32):
        return reference.scaled(codes, scale, block, edges)
    given, out = array(codes.contiguous()), np.empty(codes.numel(), np.float32)
    steps, ends = array(scale.contiguous()), array(reference.blocks(codes, block, edges))
    between(ends, lambda some, of: loops.scaled(given, steps[some], of, out))
    return tensor(out)


def _looked_up(codes: Tensor, table: Tensor) -> Tensor:
    given, out, known = array(codes.contiguous()), np.empty(codes.numel(), np.float32), array(table)
    in_parts(
        given.size, lambda start, stop: loops.look_up(given[start:stop], known, out[start:stop])
    )
    return tensor(out)


def _blocks(x: Tensor, block: int, edges: Edges, each: int = 1) -> tuple[Array, ...]:
    """Where blocks begin and end, and room for so many scales of each."""
    ends = array(reference.blocks(x, block, edges))
    return ends, *np.empty((each, ends.size - 1), np.float32)


def _halves(seed: int) -> tuple[np.uint32, np.uint32]:
    return np.uint32(seed & WORD), np.uint32(seed >> 32 & WORD)
