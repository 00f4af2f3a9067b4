"""The inner loops of codes and positions, Numba's and Triton's, against plain torch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.fast import BITS, RICE, positions, same
from thinwire.kernels import bits, bits_cpu, rice

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
def test_positions(fast, name):
    index = POSITIONS[name]
    marks, (counts, low) = bits.bitmap_encode(index, NUMEL), bits.block_encode(index, NUMEL)
    same(fast.bitmap_encode(index, NUMEL), marks)
    for mine, theirs in zip(fast.block_encode(index, NUMEL), (counts, low), strict=True):
        same(mine, theirs)
    same(fast.bitmap_decode(marks, index.numel(), NUMEL), index)
    same(fast.block_decode(counts, low), index)


@BITS
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
            bits_cpu.bitmap_encode(index, NUMEL)
        with pytest.raises(IndexError, match="outside the 200001 entries"):
            bits_cpu.block_encode(index, NUMEL)


@RICE
@pytest.mark.parametrize("name", POSITIONS)
def test_rice(fast, name):
    index = POSITIONS[name]
    data = rice.rice_encode(index)
    same(fast.rice_encode(index), data)
    assert fast.rice_size(index) == rice.rice_size(index) == data.numel()
    same(fast.rice_decode(data, index.numel(), NUMEL), index)


@RICE
def test_rice_of_gaps_wider_than_a_word(fast):
    index = torch.tensor([3, 2**31 + 5, 2**33, 2**33 + 1])
    data = rice.rice_encode(index)
    same(fast.rice_encode(index), data)
    same(fast.rice_decode(data, 4, 2**33 + 2), index)


@RICE
def test_rice_that_is_none_is_refused(fast):
    index = POSITIONS["random"][:600]
    data, k = rice.rice_encode(index), index.numel()
    wild = data.clone()
    wild[0] = 31  # no group has such an m
    wrong = [(data[:-1], k), (torch.cat([data, data[:1]]), k), (data, k - 1), (data, k + 1)]
    wrong += [(wild, k), (data[:2], k), (data[:0], k), (data, 0), (torch.zeros_like(data), k)]
    for message, count in wrong:
        assert rice.rice_decode(message, count, NUMEL) is None
        assert fast.rice_decode(message, count, NUMEL) is None
    assert fast.rice_decode(data, k, int(index[-1])) is None  # the last is outside


@RICE
@settings(max_examples=25)
@given(place=st.integers(0, 10**6), byte=st.integers(0, 255))
def test_a_damaged_rice_message_reads_alike(fast, place, byte):
    index = POSITIONS["random"][:300]
    data = rice.rice_encode(index)
    data[place % data.numel()] = byte
    mine, theirs = fast.rice_decode(data, 300, NUMEL), rice.rice_decode(data, 300, NUMEL)
    assert (mine is None) == (theirs is None)
    if theirs is not None:
        same(mine, theirs)
