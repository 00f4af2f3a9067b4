"""Codes: round trips, sizes known beforehand, and damaged messages refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.comm import local
from thinwire.payload import Sparse
from thinwire.protocols import WireError
from thinwire.wire import Wire, wire
from thinwire.wire.blocks import Natural
from thinwire.wire.indices import Int32
from thinwire.wire.link import Link
from thinwire.wire.rice import Rice, Smallest
from thinwire.wire.values import Bf16, Exact, Half

CODECS = {"exact": (Exact(), 0.0), "half": (Half(), 2**-11), "bf16": (Bf16(), 2**-8)}


@given(
    values=st.lists(st.floats(-(2.0**126), 2.0**126, width=32, allow_subnormal=False), max_size=30),
    name=st.sampled_from(sorted(CODECS)),
)
@settings(max_examples=200)
def test_values_round_trip(values, name):
    codec, grain = CODECS[name]
    x = torch.tensor(values)
    data = codec.encode(x)
    assert data.dtype == torch.uint8
    assert data.numel() == codec.nbytes(len(values))
    back = codec.decode(data, len(values), torch.float32)
    # half shares one exponent: what is a billion times smaller than the largest may vanish
    floor = float(x.abs().max()) * 2**-24 if name == "half" and values else 1e-38
    assert ((back - x).abs() <= grain * x.abs() + floor).all()
    assert back.isfinite().all()


def test_half_does_not_overflow_nor_flush():
    x = torch.tensor([1e9, -3e5, 70000.0])
    assert torch.allclose(Half().decode(Half().encode(x), 3, torch.float32), x, rtol=1e-3)
    x = torch.tensor([1e-9, -3e-12])
    assert torch.allclose(Half().decode(Half().encode(x), 2, torch.float32), x, rtol=1e-3)


@pytest.mark.parametrize("name", CODECS)
def test_non_finite_values_stay_visible(name):
    codec = CODECS[name][0]
    x = torch.tensor([1.0, float("nan"), float("inf")])
    back = codec.decode(codec.encode(x), 3, torch.float32)
    assert back.isnan().tolist() == [False, True, False]
    assert back.isinf().tolist() == [False, False, True]


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("change", [-1, 1, 5])
def test_damaged_sizes_are_refused(name, change):
    codec = CODECS[name][0]
    data = codec.encode(torch.randn(6))
    data = data[:change] if change < 0 else torch.cat([data, data[:change]])
    with pytest.raises(WireError):
        codec.decode(data, 6, torch.float32)


def test_a_hostile_exponent_is_refused():
    data = Half().encode(torch.randn(4))
    data[:4] = 255
    data[3] = 127
    with pytest.raises(WireError, match="exponent"):
        Half().decode(data, 4, torch.float32)


@pytest.mark.parametrize(("codec", "least", "most"), [(Half(), -126, 126), (Natural(), -1100, 127)])
def test_powers_of_two_are_read_up_to_their_bounds(codec, least, most):
    body = codec.encode(torch.ones(4))[4:]
    for power in (least, most):
        head = torch.tensor([power], dtype=torch.int32).view(torch.uint8)
        codec.decode(torch.cat([head, body]), 4, torch.float32)
    for power in (least - 1, most + 1):
        head = torch.tensor([power], dtype=torch.int32).view(torch.uint8)
        with pytest.raises(WireError, match=f"{power} is outside"):
            codec.decode(torch.cat([head, body]), 4, torch.float32)


def test_the_highest_vote_wins():
    votes = [torch.tensor([1, 5, -3]), torch.tensor([4, 2, -3]), torch.tensor([0, 3, -1])]
    results = local.run(3, lambda comm: Link(comm, Wire()).highest(votes[comm.rank]))
    assert [highest.tolist() for highest in results] == [[4, 5, -1]] * 3


def test_indices_are_exact_beyond_float32():
    """The public Ok-Topk casts indices to float32, exact only up to 2^24."""
    positions = torch.tensor([0, 2**24 + 1, 2**31 - 1])
    code = Int32()
    data = code.encode(positions, 2**31)
    assert data.numel() == code.nbytes(3, 2**31)
    assert torch.equal(code.decode(data, 3, 2**31), positions)
    with pytest.raises(WireError, match="do not ascend within"):
        code.decode(data, 3, 2**24)
    with pytest.raises(ValueError, match="too large for 32-bit"):
        code.encode(positions, 2**31 + 1)


def test_negative_indices_are_refused():
    data = Int32().encode(torch.tensor([-1]), 10)
    with pytest.raises(WireError, match="do not ascend within"):
        Int32().decode(data, 1, 10)


@pytest.mark.parametrize("name", ["fp32", "fp16", "bf16"])
def test_rounded_is_what_the_others_read(name):
    class One:
        rank, size = 0, 1

        def all_gather(self, x, sizes=None):
            return [x]

    link = Link(One(), wire(name))
    mine = link.round(Sparse(torch.tensor([1, 3]), torch.randn(2), 9))
    (read,) = link.all_gather(mine, ragged=False)
    assert torch.equal(read.values, mine.values)
    assert torch.equal(read.indices, mine.indices)


def test_wire_by_name():
    assert wire("fp16") == Wire(values=Half())
    assert wire(Wire()) == Wire()
    assert Wire().nbytes(10, 1000) == 80
    assert wire("bf16+rice").indices == Rice()
    assert wire("bf16", "auto").indices == wire("bf16+auto").indices == Smallest()
    for wrong in ("morse", "bf16+morse", "bf16+", "+rice", None, 8):
        with pytest.raises(ValueError, match="wire must be one of"):
            wire(wrong)
