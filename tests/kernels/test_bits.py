"""Codes and positions in few bits: Numba's against plain torch, which serves on CUDA too."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.fast import BITS, positions, same
from thinwire.kernels.cpu import bits as cpu
from thinwire.kernels.reference import bits

NUMEL = 200_001
POSITIONS = positions(NUMEL)


@BITS
@pytest.mark.parametrize("width", [1, 2, 4, 8])
@settings(max_examples=30)
@given(numbers=st.lists(st.integers(0, 255), max_size=70))
def test_packing(fast, width, numbers):
    codes = torch.tensor(numbers, dtype=torch.uint8) & (2**width - 1)
    data = bits.pack(codes, width)
    same(fast.pack(codes, width), data)
    same(fast.unpack(data, width, len(numbers)), codes)


@BITS
@pytest.mark.parametrize("name", POSITIONS)
def test_bitmaps(fast, name):
    index = POSITIONS[name]
    marks = bits.bitmap_encode(index, NUMEL)
    same(fast.bitmap_encode(index, NUMEL), marks)
    same(fast.bitmap_decode(marks, index.numel(), NUMEL), index)


@pytest.mark.parametrize("name", POSITIONS)
def test_low_halves(name):
    index = POSITIONS[name]
    counts, low = bits.block_encode(index, NUMEL)
    for mine, theirs in zip(cpu.block_encode(index, NUMEL), (counts, low), strict=True):
        same(mine, theirs)
    for form in (cpu, bits):
        same(form.block_decode(counts, low), index)


@BITS
def test_a_bitmap_of_another_number_is_refused(fast):
    index = POSITIONS["random"]
    marks = bits.bitmap_encode(index, NUMEL)
    for k in (0, index.numel() - 1, index.numel() + 1):
        assert fast.bitmap_decode(marks, k, NUMEL) is None


@pytest.mark.parametrize("form", [cpu, bits], ids=["cpu", "reference"])
def test_counts_that_do_not_add_up_are_refused(form):
    counts, low = bits.block_encode(POSITIONS["random"], NUMEL)
    for place, change in ((0, 1), (1, -1), (0, 2**31 - 1 - int(counts[0])), (2, -(2**31))):
        wrong = counts.clone()
        wrong[place] = change if change < -1 else counts[place] + change
        assert form.block_decode(wrong, low) is None
    assert form.block_decode(counts, low[:-1]) is None


def test_positions_outside_the_bucket_are_an_error():
    for outside in (-1, NUMEL):
        index = torch.tensor([outside])
        with pytest.raises(IndexError, match="outside the 200001 entries"):
            cpu.bitmap_encode(index, NUMEL)
        with pytest.raises(IndexError, match="outside the 200001 entries"):
            cpu.block_encode(index, NUMEL)
