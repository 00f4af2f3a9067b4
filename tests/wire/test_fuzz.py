"""Hostile bytes: 300,000 damaged messages, 100,000 a kind of decoder; a value or `WireError`.

With THINWIRE_FUZZ=100000 in the environment every single decoder gets so many.

What a decoder returns must be usable without a look: as many values as announced, indices that
ascend inside the bucket.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

from thinwire.payload import Sparse
from thinwire.protocols import WireError
from thinwire.wire import _INDICES as INDICES
from thinwire.wire import _VALUES, Wire
from thinwire.wire.blocks import Levels, OneBit
from thinwire.wire.slot import slot, unslot

N, K = 600, 20
VALUES = {**_VALUES, "levels": Levels(bits=4), "onebit": OneBit()}
EACH = int(os.environ.get("THINWIRE_FUZZ", "0"))


def times(decoders: int) -> int:
    return EACH or 100_000 // decoders


def damaged(good: np.ndarray, draw: np.random.Generator) -> np.ndarray:
    """A copy with bits flipped, bytes overwritten, cut, stretched, or made up altogether."""
    data = good.copy()
    kind = draw.integers(6)
    if kind == 0 and data.size:
        data[draw.integers(data.size)] ^= 1 << draw.integers(8)
    elif kind == 1 and data.size:
        data[draw.integers(data.size, size=draw.integers(1, 5))] = draw.integers(256)
    elif kind == 2:
        data = data[: draw.integers(data.size + 1)]
    elif kind == 3:
        data = np.concatenate([data, draw.integers(0, 256, draw.integers(1, 9), dtype=np.uint8)])
    elif kind == 4:
        data = draw.integers(0, 256, draw.integers(0, 2 * data.size + 2), dtype=np.uint8)
    elif data.size:
        data[: draw.integers(1, 9)] = draw.choice([0, 127, 128, 255])
    return data


def storm(good: torch.Tensor, decode, check, times: int) -> None:
    """Some are refused, some happen to be sound."""
    draw = np.random.default_rng(0)
    source, refused = good.numpy(), 0
    for _ in range(times):
        try:
            check(decode(torch.from_numpy(damaged(source, draw))))
        except WireError:
            refused += 1
    assert 0 < refused < times


def sample() -> Sparse:
    draw = torch.Generator().manual_seed(1)
    places = torch.randperm(N, generator=draw)[:K].sort().values
    return Sparse(places, torch.randn(K, generator=draw), N)


def is_ascending(indices: torch.Tensor) -> None:
    found = indices.numpy()
    assert found.size == 0 or (found[0] >= 0 and found[-1] < N and (np.diff(found) > 0).all())


@pytest.mark.slow
@pytest.mark.parametrize("name", INDICES)
def test_index_decoders(name):
    code, mine = INDICES[name], sample()

    def check(indices):
        assert indices.numel() == K
        is_ascending(indices)

    good = code.encode(mine.indices, N)
    storm(good, lambda data: code.decode(data, K, N), check, times(len(INDICES)))


@pytest.mark.slow
@pytest.mark.parametrize("name", VALUES)
def test_value_decoders(name):
    codec, mine = VALUES[name], sample()

    def check(values):
        assert values.shape == (K,) and values.dtype == torch.float32

    good = codec.encode(mine.values)
    storm(good, lambda data: codec.decode(data, K, torch.float32), check, times(len(VALUES)))


@pytest.mark.slow
@pytest.mark.parametrize("name", INDICES)
def test_whole_messages_and_slots(name):
    """Counts and lengths are damaged too."""
    coded, mine = Wire(indices=INDICES[name]), sample()

    def check(found):
        assert found.indices.shape == found.values.shape
        is_ascending(found.indices)

    def read(data):
        return coded.read(data, (0, N), mine)

    good = coded.write(mine, coded.values.encode(mine.values), (0, N))
    storm(good, read, check, times(2 * len(INDICES)))
    full = slot(good, good.numel() + 40)
    storm(full, lambda data: read(unslot(data)), check, times(2 * len(INDICES)))
