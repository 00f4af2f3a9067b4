"""Numbers in sixteen bits and fewer: tensors in and out, `scales_loops` does the work."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from thinwire.kernels.cpu import scales_loops as loops
from thinwire.kernels.cpu.arrays import Array, as_array, as_tensor, run_blocks, run_parts
from thinwire.kernels.cpu.bits import pack
from thinwire.kernels.cpu.lanes import INFINITE
from thinwire.kernels.reference import scales as reference
from thinwire.kernels.reference.scales import BROKEN, WORD, Edges, find_edges


def half_encode(x: Tensor) -> tuple[Tensor, Tensor]:
    numbers, codes = as_array(x), np.empty(x.numel(), np.uint16)
    bits = numbers.view(np.uint32)
    top = max(run_parts(bits.size, lambda start, stop: int(loops.find_largest(bits[start:stop]))))
    power = 0
    if 0 < top < INFINITE:
        power = reference.POWER_HALF - math.frexp(float(np.uint32(top).view(np.float32)))[1]
        power = min(126, max(-126, power))
    factor = np.float32(2.0**power)
    run_parts(
        bits.size,
        lambda start, stop: loops.round_half(numbers[start:stop], factor, codes[start:stop]),
    )
    return torch.tensor([power], dtype=torch.int32), as_tensor(codes).view(torch.float16)


def bf16_encode(x: Tensor) -> Tensor:
    bits, codes = as_array(x).view(np.uint32), np.empty(x.numel(), np.uint16)
    run_parts(bits.size, lambda start, stop: loops.round_bf16(bits[start:stop], codes[start:stop]))
    return as_tensor(codes).view(torch.bfloat16)


def int8_encode(x: Tensor, block: int, edges: Edges = None) -> tuple[Tensor, Tensor]:
    numbers, ends, scale = as_array(x), *_split(x, block, edges)
    codes = np.empty(x.numel(), np.int8)
    run_blocks(ends, lambda some, of: loops.round_int8(numbers, of, scale[some], codes))
    return as_tensor(scale), as_tensor(codes)


def fp8_encode(x: Tensor, block: int, edges: Edges = None) -> tuple[Tensor, Tensor]:
    numbers, ends, scale = as_array(x), *_split(x, block, edges)
    codes = np.empty(x.numel(), np.uint8)
    run_blocks(ends, lambda some, of: loops.round_fp8(numbers, of, scale[some], codes))
    return as_tensor(scale), as_tensor(codes)


def fp8_decode(codes: Tensor, scale: Tensor, block: int, edges: Edges = None) -> Tensor:
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    return scaled(_look_up(codes, every.to(torch.float32)), scale, block, edges)


def sign_encode(x: Tensor, block: int, edges: Edges = None) -> tuple[Tensor, Tensor]:
    numbers, ends, scale = as_array(x), *_split(x, block, edges)
    run_blocks(ends, lambda some, of: loops.average(numbers, of, scale[some]))
    return as_tensor(scale), pack((x >= 0).view(torch.uint8), 1)


def onebit_encode(x: Tensor, block: int, edges: Edges = None) -> tuple[Tensor, Tensor, Tensor]:
    numbers, ends, above, below = as_array(x), *_split(x, block, edges, 2)
    run_blocks(ends, lambda some, of: loops.average_signs(numbers, of, above[some], below[some]))
    return as_tensor(above), as_tensor(below), pack((x >= 0).view(torch.uint8), 1)


def either(signs: Tensor, above: Tensor, below: Tensor, block: int, edges: Edges = None) -> Tensor:
    given, out = as_array(signs.contiguous()), np.empty(signs.numel(), np.float32)
    high, low = as_array(above.contiguous()), as_array(below.contiguous())
    ends = as_array(find_edges(signs, block, edges))
    run_blocks(ends, lambda some, of: loops.choose(given, high[some], low[some], of, out))
    return as_tensor(out)


def levels_encode(
    x: Tensor, block: int, levels: int, seed: int | None, edges: Edges = None,
    *, norm: str, clip: float | None, fitted: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    numbers, ends, scale = as_array(x), *_split(x, block, edges)
    codes = np.empty(x.numel(), np.uint8)
    low, high = _split_seed(seed or 0)
    limit = math.inf if clip is None else float(clip)

    def part(some: slice, of: Array) -> None:
        loops.round_levels(
            numbers, of, np.float32(levels), low, high, seed is None, norm == "max", limit, fitted,
            scale[some], codes,
        )  # fmt: skip

    run_blocks(ends, part)
    return as_tensor(scale), as_tensor(codes)


def natural_encode(x: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    numbers, power = as_array(x), np.empty(x.numel(), np.int16)
    bits = numbers.view(np.uint32)
    codes = np.zeros(x.numel(), np.uint8)
    low, high = _split_seed(seed)

    def first(start: int, stop: int) -> int:
        return int(loops.round_powers(numbers[start:stop], low, high, start, power[start:stop]))

    def second(start: int, stop: int) -> None:
        loops.count_down(bits[start:stop], power[start:stop], top, codes[start:stop])

    top = max(run_parts(bits.size, first))
    if top < BROKEN:
        top = top if top > loops.NOTHING else 0
        run_parts(bits.size, second)
    return torch.tensor([top], dtype=torch.int32), as_tensor(codes)


def natural_decode(codes: Tensor, top: int, dtype: torch.dtype) -> Tensor:
    if dtype != torch.float32:
        return reference.natural_decode(codes, top, dtype)
    return _look_up(codes, reference.list_powers(top).to(torch.float32))


def scaled(codes: Tensor, scale: Tensor, block: int, edges: Edges = None) -> Tensor:
    if codes.dtype not in (torch.int8, torch.float32):
        return reference.scaled(codes, scale, block, edges)
    given, out = as_array(codes.contiguous()), np.empty(codes.numel(), np.float32)
    steps, ends = as_array(scale.contiguous()), as_array(find_edges(codes, block, edges))
    run_blocks(ends, lambda some, of: loops.multiply(given, steps[some], of, out))
    return as_tensor(out)


def _look_up(codes: Tensor, table: Tensor) -> Tensor:
    given, out, known = (
        as_array(codes.contiguous()),
        np.empty(codes.numel(), np.float32),
        as_array(table),
    )
    run_parts(
        given.size, lambda start, stop: loops.look_up(given[start:stop], known, out[start:stop])
    )
    return as_tensor(out)


def _split(x: Tensor, block: int, edges: Edges, each: int = 1) -> tuple[Array, ...]:
    """Where blocks begin and end, and room for so many scales of each."""
    ends = as_array(find_edges(x, block, edges))
    return ends, *np.empty((each, ends.size - 1), np.float32)


def _split_seed(seed: int) -> tuple[np.uint32, np.uint32]:
    return np.uint32(seed & WORD), np.uint32(seed >> 32 & WORD)
