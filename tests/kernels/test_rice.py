"""Golomb-Rice codes: Numba's against plain torch, which serves on CUDA too."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.fast import RICE, positions, same
from thinwire.kernels.cpu import rice as cpu
from thinwire.kernels.reference import rice

NUMEL = 200_001
POSITIONS = positions(NUMEL)


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


@pytest.mark.parametrize("k", [0, 1, 255, 256, 257, 5000])
@pytest.mark.parametrize("n", [5000, 2_000_000, 2**40])
def test_rice_of_any_density(k, n):
    draws = torch.randint(0, n, (2 * k,), generator=torch.Generator().manual_seed(k))
    for indices in (draws.unique()[:k], torch.arange(k), torch.arange(n - k, n)):
        data = rice.rice_encode(indices)
        assert torch.equal(cpu.rice_encode(indices), data)
        assert cpu.rice_size(indices) == rice.rice_size(indices) == data.numel()
        back = cpu.rice_decode(data, indices.numel(), n)
        assert back is not None
        assert torch.equal(back, indices)


@settings(max_examples=300)
@given(st.data())
def test_spoilt_codes_are_refused_alike(data):
    """What one decoder takes the other takes, and they read the same."""
    n = data.draw(st.sampled_from([40, 3000, 10**6]))
    indices = torch.tensor(sorted(data.draw(st.sets(st.integers(0, n - 1), max_size=40))))
    code = bytearray(cpu.rice_encode(indices.to(torch.int64)).tolist())
    for _ in range(data.draw(st.integers(0, 3))):
        if code:
            code[data.draw(st.integers(0, len(code) - 1))] ^= data.draw(st.integers(1, 255))
    code = code[: data.draw(st.integers(0, len(code)))] + data.draw(st.binary(max_size=2))
    spoilt = torch.tensor(list(code), dtype=torch.uint8)
    k = data.draw(st.integers(0, indices.numel() + 2))
    mine, theirs = cpu.rice_decode(spoilt, k, n), rice.rice_decode(spoilt, k, n)
    assert (mine is None) == (theirs is None)
    assert mine is None or torch.equal(mine, theirs)
