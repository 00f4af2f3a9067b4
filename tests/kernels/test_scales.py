"""The codes of numbers, Numba's and Triton's, against plain torch."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.fast import SCALES, same
from thinwire.kernels.cpu import scales as cpu
from thinwire.kernels.reference import scales

SEED = 0x1234_5678_9ABC_DEF0


def _numbers() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    plain = torch.randn(300, generator=draw)
    broken, huge = plain.clone(), plain.clone()
    broken[[0, 144, 296]] = torch.tensor([float("nan"), float("inf"), -float("inf")])
    huge[[0, 152]] = torch.tensor([3.4028235e38, -3.4e38])
    return {
        "random": plain,
        "nothing": plain[:0],
        "one": plain[:1],
        "zeros": torch.zeros(100),
        "some zeros": plain * (plain > 0),
        "halves": torch.arange(-127, 128) * 0.5,  # exactly between two codes
        "tiny": plain * 1e-44,
        "huge": huge,
        "broken": broken,
        "spread": plain * torch.exp2(torch.randint(-60, 60, (300,), generator=draw).float()),
    }


NUMBERS = _numbers()
numbers = pytest.mark.parametrize("x", NUMBERS.values(), ids=NUMBERS)


def blocks_of(block: int, x: torch.Tensor) -> torch.Tensor:
    """Fewer numbers where each is a block of its own: Triton's interpreter takes them in turn."""
    return x[::8].contiguous() if block == 1 else x


def alike(fast, name: str, *args, **options) -> tuple[torch.Tensor, ...]:
    """The reference's result, which the kernel's equals, where there is one."""
    theirs = getattr(scales, name)(*args, **options)
    mine = getattr(fast, name, getattr(scales, name))(*args, **options)
    mine, theirs = ((y,) if isinstance(y, torch.Tensor) else y for y in (mine, theirs))
    for a, b in zip(mine, theirs, strict=True):
        same(a, b)
    return theirs


@SCALES
@numbers
def test_sixteen_bits(fast, x):
    alike(fast, "half_encode", x)
    alike(fast, "bf16_encode", x)


def decodings(x: torch.Tensor) -> dict[str, tuple]:
    """Every code that is decoded in place, with its arguments."""
    power, halves = scales.half_encode(x)
    edges = scales.find_edges(x, 7)
    return {
        "half_decode": (halves, int(power), torch.float32),
        "bf16_decode": (scales.bf16_encode(x), torch.float32),
        "scaled": (*reversed(scales.int8_encode(x, 7)), 7, edges),
        "fp8_decode": (*reversed(scales.fp8_encode(x, 7)), 7, edges),
    }


@pytest.mark.parametrize("name", ["half_decode", "bf16_decode", "scaled", "fp8_decode"])
@numbers
def test_decoded_numbers_are_new_or_placed_or_added(name, x):
    given = decodings(x)[name]
    (values,) = alike(cpu, name, *given)
    out = torch.full_like(x, 3.0)
    assert getattr(cpu, name)(*given, out=out) is out
    same(out, values)
    for alpha in (-1.0, 1 / 3):
        mine, theirs = torch.linspace(-1, 1, x.numel()), torch.linspace(-1, 1, x.numel())
        getattr(cpu, name)(*given, out=mine, alpha=alpha)
        same(mine, theirs.add_(values * alpha))


@numbers
def test_codes_are_new_or_go_where_there_is_room(x):
    blocks = -(-x.numel() // 7)
    for name, kind in (("int8_encode", torch.int8), ("fp8_encode", torch.uint8)):
        into = torch.empty(blocks), torch.empty(x.numel(), dtype=kind)
        for fast in (cpu, scales):
            got = getattr(fast, name)(x, 7, None, into)
            for a, b, c in zip(got, into, getattr(scales, name)(x, 7), strict=True):
                assert a is b
                same(a, c)
    for name, kind in (("half_encode", torch.float16), ("bf16_encode", torch.bfloat16)):
        codes = torch.empty(x.numel(), dtype=kind)
        alike(cpu, name, x, codes)


@SCALES
@pytest.mark.parametrize("block", [1, 7, 256])
@numbers
def test_eight_bits(fast, x, block):
    x = blocks_of(block, x)
    scale, codes = alike(fast, "int8_encode", x, block)
    alike(fast, "scaled", codes, scale, block)
    scale, codes = alike(fast, "fp8_encode", x, block)
    alike(fast, "fp8_decode", codes, scale, block)


@SCALES
def test_every_eight_bit_number_comes_back(fast):
    every = torch.arange(256, dtype=torch.uint8)
    finite = every[every.view(torch.float8_e4m3fn).float().isfinite()]
    scale, codes = alike(fast, "fp8_encode", finite.view(torch.float8_e4m3fn).float(), 256)
    same(codes, finite)
    assert scale.tolist() == [1.0]


@SCALES
@pytest.mark.parametrize("block", [1, 7, 512])
@numbers
def test_one_bit(fast, x, block):
    x = blocks_of(block, x)
    alike(fast, "sign_encode", x, block)
    above, below, _ = alike(fast, "onebit_encode", x, block)
    alike(fast, "either", (x >= 0).to(torch.uint8), above, below, block)


@SCALES
@pytest.mark.parametrize(
    ("norm", "clip", "fitted"),
    [("max", None, False), ("max", 1.5, True), ("l2", None, True), ("l2", 1.5, False)],
)
@pytest.mark.parametrize("block", [7, 256])
@pytest.mark.parametrize("seed", [SEED, None])
@numbers
def test_levels(fast, x, block, norm, clip, fitted, seed):
    alike(fast, "levels_encode", x, block, 7, seed, norm=norm, clip=clip, fitted=fitted)


@SCALES
def test_levels_without_a_seed_are_the_nearest(fast):
    x = torch.tensor([7.0, 3.4, 3.6, -3.4, -3.6, 0.4, -0.6])
    _, codes = fast.levels_encode(x, 7, 7, None, norm="max", clip=None, fitted=False)
    assert (codes.int() - 7).tolist() == [7, 3, 4, -3, -4, 0, -1]


@SCALES
def test_blocks_that_end_where_parameters_end(fast):
    x, edges = NUMBERS["random"], torch.tensor([0, 3, 10, 11, 160, 300])
    scale, codes = alike(fast, "int8_encode", x, 160, edges)
    alike(fast, "scaled", codes, scale, 160, edges)
    scale, codes = alike(fast, "fp8_encode", x, 160, edges)
    alike(fast, "fp8_decode", codes, scale, 160, edges)
    alike(fast, "sign_encode", x, 160, edges)
    above, below, _ = alike(fast, "onebit_encode", x, 160, edges)
    alike(fast, "either", (x >= 0).to(torch.uint8), above, below, 160, edges)
    alike(fast, "levels_encode", x, 160, 7, SEED, edges, norm="l2", clip=1.5, fitted=True)


@SCALES
def test_what_rounds_past_the_largest_number_is_held_on_its_own_side(fast):
    top = torch.finfo().max
    huge = torch.tensor([-top, top, -top, top])
    codes = torch.tensor([-128, 127, -100, 100], dtype=torch.int8)
    (back,) = alike(fast, "scaled", codes, torch.tensor([top / 100]), 4)
    assert back[:2].tolist() == [-top, top]
    (sixteen,) = alike(fast, "bf16_encode", huge)
    assert torch.equal(sixteen.float(), huge.sign() * torch.finfo(torch.bfloat16).max)
    power, halves = alike(fast, "half_encode", huge)
    assert torch.equal(halves.float(), huge.sign() * scales.TOP_HALF * 2.0 ** int(power))


@numbers
def test_powers_of_two(x):
    top, codes = alike(cpu, "natural_encode", x, SEED)
    if int(top) != scales.BROKEN:
        alike(cpu, "natural_decode", codes, int(top), torch.float32)


def test_random_numbers_are_even_and_unlike():
    first, second = scales.draw_uniform(100_000, 5), scales.draw_uniform(100_000, 5 + 2**32)
    for draw in (first, second):
        assert float(draw.min()) >= 0 and float(draw.max()) < 1
        assert (torch.histc(draw, 10, 0, 1) / 10_000 - 1).abs().max() < 0.05
    pairs = torch.stack([first[:-1], first[1:], second[1:]])
    assert torch.corrcoef(pairs).fill_diagonal_(0).abs().max() < 0.02


@pytest.mark.parametrize("threads", [2, 3])
def test_parts_for_threads_make_no_difference(threads):
    x = torch.randn(700_001, generator=torch.Generator().manual_seed(2))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        alike(cpu, "half_encode", x)
        scale, codes = alike(cpu, "int8_encode", x, 256)
        alike(cpu, "scaled", codes, scale, 256)
        alike(cpu, "levels_encode", x, 512, 1, SEED, norm="max", clip=2.5, fitted=True)
        alike(cpu, "natural_encode", x, SEED)
        alike(cpu, "onebit_encode", x, 512)
    finally:
        torch.set_num_threads(before)
