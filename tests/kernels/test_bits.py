"""The codes' inner loops, Numba's and Triton's, against plain torch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.kernels import bits, narrow

MODULES = [narrow]
try:
    from thinwire.kernels import narrow_gpu
except ModuleNotFoundError:  # no triton
    pass
else:
    MODULES.append(narrow_gpu)
every = pytest.mark.parametrize("fast", MODULES, ids=lambda module: module.__name__.split(".")[-1])


def _numbers() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    plain = torch.randn(300, generator=draw)
    broken, huge = plain.clone(), plain.clone()
    broken[[3, 140, 299]] = torch.tensor([float("nan"), float("inf"), -float("inf")])
    huge[[0, 150]] = torch.tensor([3.4028235e38, -3.4e38])
    return {
        "random": plain,
        "nothing": plain[:0],
        "one": plain[:1],
        "zeros": torch.zeros(100),
        "halves": torch.arange(-127, 128) * 0.5,  # exactly between two codes
        "tiny": plain * 1e-44,
        "huge": huge,
        "broken": broken,
        "spread": plain * torch.exp2(torch.randint(-60, 60, (300,), generator=draw).float()),
    }


def _positions() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    n = 200_001
    few = torch.randperm(n, generator=draw)[:2000].sort().values
    return {
        "random": few,
        "none": few[:0],
        "last": torch.tensor([n - 1]),
        "edges": torch.tensor([0, 7, 8, 65_535, 65_536, 131_071, 131_072, n - 1]),
        "dense": torch.arange(65_000, 67_000),
    }


NUMBERS, POSITIONS, NUMEL = _numbers(), _positions(), 200_001


def _same(mine: torch.Tensor, theirs: torch.Tensor) -> None:
    assert mine.dtype == theirs.dtype
    torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)


@every
@pytest.mark.parametrize("block", [7, 256, 2000])
@pytest.mark.parametrize("name", NUMBERS)
def test_int8_and_back(fast, name, block):
    x = NUMBERS[name]
    scale, codes = bits.int8_encode(x, block)
    mine, coded = fast.int8_encode(x, block)
    _same(mine, scale)
    _same(coded, codes)
    _same(fast.scaled(codes, scale, block), bits.scaled(codes, scale, block))


@every
@pytest.mark.parametrize("block", [7, 512])
@pytest.mark.parametrize("name", NUMBERS)
def test_signs(fast, name, block):
    x = NUMBERS[name]
    scale, signs = bits.sign_encode(x, block)
    mine, signed = fast.sign_encode(x, block)
    _same(signed, signs)
    torch.testing.assert_close(mine, scale, rtol=1e-6, atol=1e-45, equal_nan=True)


@every
def test_blocks_of_one_number(fast):
    x = NUMBERS["broken"][:20]
    for mine, theirs in zip(fast.int8_encode(x, 1), bits.int8_encode(x, 1), strict=True):
        _same(mine, theirs)
    for mine, theirs in zip(fast.sign_encode(x, 1), bits.sign_encode(x, 1), strict=True):
        _same(mine, theirs)


@every
@pytest.mark.parametrize("width", [1, 2, 4, 8])
@settings(max_examples=30)
@given(numbers=st.lists(st.integers(0, 255), max_size=70))
def test_packing(fast, width, numbers):
    codes = torch.tensor(numbers, dtype=torch.uint8) & (2**width - 1)
    data = bits.pack(codes, width)
    _same(fast.pack(codes, width), data)
    _same(fast.unpack(data, width, len(numbers)), codes)


@every
@pytest.mark.parametrize("name", POSITIONS)
def test_positions(fast, name):
    index = POSITIONS[name]
    marks, (counts, low) = bits.bitmap_encode(index, NUMEL), bits.block_encode(index, NUMEL)
    _same(fast.bitmap_encode(index, NUMEL), marks)
    for mine, theirs in zip(fast.block_encode(index, NUMEL), (counts, low), strict=True):
        _same(mine, theirs)
    _same(fast.bitmap_decode(marks, index.numel(), NUMEL), index)
    _same(fast.block_decode(counts, low), index)


@every
def test_what_does_not_fit_is_refused(fast):
    index = POSITIONS["random"]
    marks, (counts, low) = bits.bitmap_encode(index, NUMEL), bits.block_encode(index, NUMEL)
    for k in (0, index.numel() - 1, index.numel() + 1):
        assert fast.bitmap_decode(marks, k, NUMEL) is None
    for place, change in ((0, 1), (1, -1), (0, 2**31 - 1 - int(counts[0])), (2, -(2**31))):
        wrong = counts.clone()
        wrong[place] = change if change < -1 else counts[place] + change
        assert fast.block_decode(wrong, low) is None
    assert fast.block_decode(counts, low[:-1]) is None


def test_positions_outside_the_bucket_are_an_error():
    for outside in (-1, NUMEL):
        index = torch.tensor([outside])
        with pytest.raises(IndexError, match="outside the 200001 entries"):
            narrow.bitmap_encode(index, NUMEL)
        with pytest.raises(IndexError, match="outside the 200001 entries"):
            narrow.block_encode(index, NUMEL)
