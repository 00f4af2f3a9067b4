"""Numbers in sixteen bits and fewer: tensors in and out, `scales_loops` does the work."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from thinwire.kernels.cpu import decode_loops
from thinwire.kernels.cpu import scales_loops as loops
from thinwire.kernels.cpu.arrays import Array, as_array, as_tensor, run_blocks, run_parts
from thinwire.kernels.cpu.bits import pack
from thinwire.kernels.cpu.lanes import INFINITE
from thinwire.kernels.reference import scales as reference
from thinwire.kernels.reference.scales import BROKEN, WORD, Edges, Room, find_edges


def half_encode(x: Tensor, codes: Tensor | None = None) -> tuple[Tensor, Tensor]:
    numbers = as_array(x)
    codes = torch.empty(x.numel(), dtype=torch.float16) if codes is None else codes
    bits, halves = numbers.view(np.uint32), as_array(codes).view(np.uint16)
    top = max(run_parts(bits.size, lambda start, stop: int(loops.find_largest(bits[start:stop]))))
    power = 0
    if 0 < top < INFINITE:
        power = reference.POWER_HALF - math.frexp(float(np.uint32(top).view(np.float32)))[1]
        power = min(126, max(-126, power))
    factor = np.float32(2.0**power)
    run_parts(
        bits.size,
        lambda start, stop: loops.round_half(numbers[start:stop], factor, halves[start:stop]),
    )
    return torch.tensor([power], dtype=torch.int32), codes


def half_decode(
    codes: Tensor, power: int, dtype: torch.dtype, out: Tensor | None = None,
    alpha: float | None = None,
) -> Tensor:  # fmt: skip
    if dtype != torch.float32:
        return reference.half_decode(codes, power, dtype, out, alpha)
    halves, out = as_array(codes).view(np.uint16), _choose_room(codes, out)
    values, factor = as_array(out), np.float32(2.0**-power)
    weight, adds = np.float32(alpha or 0.0), alpha is not None
    run_parts(
        halves.size,
        lambda start, stop: decode_loops.widen_half(
            halves[start:stop], factor, weight, adds, values[start:stop]
        ),
    )
    return out


def bf16_encode(x: Tensor, codes: Tensor | None = None) -> Tensor:
    codes = torch.empty(x.numel(), dtype=torch.bfloat16) if codes is None else codes
    bits, halves = as_array(x).view(np.uint32), as_array(codes.view(torch.int16)).view(np.uint16)
    run_parts(bits.size, lambda start, stop: loops.round_bf16(bits[start:stop], halves[start:stop]))
    return codes


def bf16_decode(
    codes: Tensor, dtype: torch.dtype, out: Tensor | None = None, alpha: float | None = None
) -> Tensor:
    if dtype != torch.float32:
        return reference.bf16_decode(codes, dtype, out, alpha)
    halves, out = as_array(codes.view(torch.int16)).view(np.uint16), _choose_room(codes, out)
    values, weight, adds = as_array(out), np.float32(alpha or 0.0), alpha is not None
    run_parts(
        halves.size,
        lambda start, stop: decode_loops.widen_bf16(
            halves[start:stop], weight, adds, values[start:stop]
        ),
    )
    return out


def int8_encode(
    x: Tensor, block: int, edges: Edges = None, into: Room = None
) -> tuple[Tensor, Tensor]:
    numbers, ends = as_array(x), as_array(find_edges(x, block, edges))
    scale, codes = _make_room(ends, torch.int8) if into is None else into
    steps, small = as_array(scale), as_array(codes)
    run_blocks(ends, lambda some, of: loops.round_int8(numbers, of, steps[some], small))
    return scale, codes


def fp8_encode(
    x: Tensor, block: int, edges: Edges = None, into: Room = None
) -> tuple[Tensor, Tensor]:
    numbers, ends = as_array(x), as_array(find_edges(x, block, edges))
    scale, codes = _make_room(ends, torch.uint8) if into is None else into
    steps, small = as_array(scale), as_array(codes)
    run_blocks(ends, lambda some, of: loops.round_fp8(numbers, of, steps[some], small))
    return scale, codes


def fp8_decode(
    codes: Tensor, scale: Tensor, block: int, edges: Edges = None, out: Tensor | None = None,
    alpha: float | None = None,
) -> Tensor:  # fmt: skip
    if scale.dtype != torch.float32:
        return reference.fp8_decode(codes, scale, block, edges, out, alpha)
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float32)
    given, out, known = as_array(codes.contiguous()), _choose_room(codes, out), as_array(every)
    values, weight, adds = as_array(out), np.float32(alpha or 0.0), alpha is not None
    steps, ends = as_array(scale.contiguous()), as_array(find_edges(codes, block, edges))
    run_blocks(
        ends,
        lambda some, of: decode_loops.look_up_scaled(
            given, known, steps[some], of, weight, adds, values
        ),
    )
    return out


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
    run_blocks(ends, lambda some, of: decode_loops.choose(given, high[some], low[some], of, out))
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


def scaled(
    codes: Tensor, scale: Tensor, block: int, edges: Edges = None, out: Tensor | None = None,
    alpha: float | None = None,
) -> Tensor:  # fmt: skip
    if codes.dtype != torch.int8:
        return reference.scaled(codes, scale, block, edges, out, alpha)
    given, out = as_array(codes.contiguous()), _choose_room(codes, out)
    values, weight, adds = as_array(out), np.float32(alpha or 0.0), alpha is not None
    steps, ends = as_array(scale.contiguous()), as_array(find_edges(codes, block, edges))
    run_blocks(
        ends, lambda some, of: decode_loops.multiply(given, steps[some], of, weight, adds, values)
    )
    return out


def _choose_room(codes: Tensor, out: Tensor | None) -> Tensor:
    """Where as many numbers go as there are codes."""
    return torch.empty(codes.numel(), dtype=torch.float32) if out is None else out


def _make_room(ends: Array, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    """For the scales of these blocks, and for their codes."""
    return torch.empty(ends.size - 1), torch.empty(int(ends[-1]), dtype=kind)


def _look_up(codes: Tensor, table: Tensor) -> Tensor:
    given, out, known = (
        as_array(codes.contiguous()),
        np.empty(codes.numel(), np.float32),
        as_array(table),
    )
    run_parts(
        given.size,
        lambda start, stop: decode_loops.look_up(given[start:stop], known, out[start:stop]),
    )
    return as_tensor(out)


def _split(x: Tensor, block: int, edges: Edges, each: int = 1) -> tuple[Array, ...]:
    """Where blocks begin and end, and room for so many scales of each."""
    ends = as_array(find_edges(x, block, edges))
    return ends, *np.empty((each, ends.size - 1), np.float32)


def _split_seed(seed: int) -> tuple[np.uint32, np.uint32]:
    return np.uint32(seed & WORD), np.uint32(seed >> 32 & WORD)
