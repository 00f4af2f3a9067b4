"""Index codes: exact both ways, sizes known before the work, close to the entropy."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from thinwire import Bucket
from thinwire.payload import Sparse
from thinwire.protocols import WireError
from thinwire.wire import wire
from thinwire.wire.indices import BLOCK, Bitmap, Blocks, Int32
from thinwire.wire.rice import GROUP, Rice, Smallest
from thinwire.wire.slot import fit, slot, unslot

LAYOUT = Bucket.of(
    {"narrow": torch.zeros(40, 50), "bias": torch.zeros(7), "wide": torch.zeros(3, 70_000)},
    state={},
).layout
CODES = {
    "int32": Int32(),
    "bitmap": Bitmap(),
    "u16": Blocks(),
    "rice": Rice(),
    "smallest": Smallest(),
}


def subset(k: int, n: int, seed: int = 0) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randperm(n, generator=draw)[:k].sort().values


def check(code, indices, numel):
    data = code.encode(indices, numel)
    assert data.dtype == torch.uint8
    assert data.numel() == code.size(indices, numel)
    if code.fixed:
        assert data.numel() == code.nbytes(indices.numel(), numel)
    assert torch.equal(code.decode(data, indices.numel(), numel), indices)
    return data.numel()


@pytest.mark.parametrize("name", CODES)
@given(data=st.data())
def test_round_trip(name, data):
    numel = data.draw(st.one_of(st.integers(1, 400), st.sampled_from([65_536, 65_537, 140_000])))
    places = data.draw(st.sets(st.integers(0, numel - 1), max_size=60))
    check(CODES[name], torch.tensor(sorted(places), dtype=torch.int64), numel)


@pytest.mark.parametrize("name", CODES)
def test_corners(name):
    code, numel = CODES[name], LAYOUT.numel
    none = torch.empty(0, dtype=torch.int64)
    for indices in (
        none,
        torch.tensor([0]),
        torch.tensor([numel - 1]),
        torch.arange(numel),
        torch.arange(0, numel, 2),
        subset(5000, numel),
        torch.arange(BLOCK - 3, BLOCK + 3),
        torch.arange(3 * GROUP),
    ):
        check(code, indices, numel)
    check(code, none, 0)


@pytest.mark.parametrize("density", [0.001, 0.01, 0.05])
def test_rice_is_within_a_seventh_of_a_bit_of_the_entropy(density):
    """H(p)/p bits a position of a random subset; the parameters of every 256 gaps included."""
    n = 4_000_000
    k = round(density * n)
    entropy = (-density * math.log2(density) - (1 - density) * math.log2(1 - density)) / density
    bits = 8 * check(Rice(), subset(k, n), n) / k
    assert entropy <= bits <= entropy + 0.15
    assert 8 * Rice().nbytes(k, n) / k == pytest.approx(bits, rel=0.002)


def test_rice_follows_crowded_layers():
    """Half of the positions in a hundredth of the bucket: fewer bits than if they were random."""
    n = 2_000_000
    crowded = torch.cat([subset(10_000, n // 100), subset(10_000, n - n // 100, 1) + n // 100])
    assert check(Rice(), crowded, n) < 0.75 * Rice().nbytes(20_000, n)


@pytest.mark.parametrize(
    ("k", "n", "best"), [(3, 10_000, 2), (100, 10_000, 2), (7_000, 10_000, 3), (1, 2**30, 0)]
)
def test_the_smallest_is_taken(k, n, best):
    indices = subset(k, n) if n < 10**6 else torch.tensor([2**29])
    code = Smallest()
    sizes = [one.size(indices, n) for one in code.codes]
    assert sizes.index(min(sizes)) == best
    data = code.encode(indices, n)
    assert int(data[0]) == best and data.numel() == 1 + min(sizes)


@pytest.mark.parametrize("name", CODES)
@pytest.mark.parametrize("numel", [9, 16, 65_537])
def test_the_last_position_is_the_bound(name, numel):
    """The last of a bucket is read, the one after it is refused."""
    code, last = CODES[name], torch.tensor([0, numel - 1])
    assert torch.equal(code.decode(code.encode(last, numel), 2, numel), last)
    with pytest.raises(WireError):
        code.decode(code.encode(last + torch.tensor([0, 1]), numel + 1), 2, numel)


def test_an_unknown_code_is_refused():
    codes = Smallest().codes
    for which in (len(codes), 255):
        with pytest.raises(WireError, match=f"index code {which} is unknown"):
            Smallest().decode(torch.tensor([which], dtype=torch.uint8), 0, 10)


def test_a_message_announces_at_most_what_there_is_room_for():
    made, like = wire("fp32+rice"), Sparse(torch.arange(3), torch.ones(3), 3)
    data = made.write(like, made.values.encode(like.values), (0, 3))
    assert torch.equal(made.read(data, (0, 3), like).indices, like.indices)
    with pytest.raises(WireError, match="announces 3 of at most 2"):
        made.read(data, (0, 2), like)
    full = slot(data, data.numel() + 4)
    assert torch.equal(unslot(full), data)
    with pytest.raises(WireError, match=f"announces {data.numel()} of at most {data.numel() - 1}"):
        unslot(full[:-1])


def test_what_does_not_ascend_is_refused():
    for wrong in ([1, 0], [2, 2], [-1, 3], [5, 10]):
        data = torch.tensor(wrong, dtype=torch.int32).view(torch.uint8)
        with pytest.raises(WireError, match="ascend"):
            Int32().decode(data, 2, 10)


@pytest.mark.parametrize("coded", ["fp32+int32", "bf16+rice", "int8+auto", "fp16+bitmap", "sign"])
def test_a_slot_takes_the_largest_that_fit(coded):
    """Full to within a few per cent, never over; what is left out is smaller than what is in."""
    draw = torch.Generator().manual_seed(3)
    n, made = 20_000, wire(coded)
    mine = Sparse(subset(4000, n), torch.randn(4000, generator=draw), n)
    for room in (0, 3, 4, 20, 500, 2503, 3000, 6000, 100_000):
        kept = fit(made, mine, (0, n), room)
        taken = made.size(kept, (0, n)) + 4
        assert taken <= room or kept.entries == 0
        if 0 < kept.entries < 4000:
            assert room < 100 or taken > 0.93 * room
            inside = torch.isin(mine.indices, kept.indices)
            assert mine.values[inside].abs().min() >= mine.values[~inside].abs().max()
            data = slot(made.write(kept, made.values.encode(kept.values), (0, n)), room)
            assert data.numel() == room
            read = made.read(unslot(data), (0, n), mine)
            assert torch.equal(read.indices, kept.indices)
