"""Views: which rows a bucket is seen as, how many entries each keeps, and where they lie."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.bucket import (
    Bucket,
    budget,
    by_dim0,
    by_dim1,
    by_layer,
    by_longer,
    by_region,
    by_row,
    flat_indices,
    whole,
)
from thinwire.layout import Layout
from thinwire.operand import Sum
from thinwire.schedule import ByParameter

VIEWS = [whole, by_layer, by_row, by_dim1, by_dim0, by_longer]
shapes = st.lists(st.lists(st.integers(1, 6), min_size=0, max_size=4), min_size=1, max_size=4)


def bucket_of(shapes: list[list[int]], step: int = 0) -> Bucket:
    torch.manual_seed(0)
    tensors = {f"p{i}": torch.randn(shape) for i, shape in enumerate(shapes)}
    return Bucket.of(tensors, state={}, step=step)


@given(shapes=shapes, density=st.floats(0.001, 1.0), step=st.integers(0, 50))
@settings(max_examples=60)
@pytest.mark.parametrize("view", VIEWS)
def test_rows_cover_the_bucket_once(view, shapes, density, step):
    bucket = bucket_of(shapes, step)
    positions = []
    for piece in view(bucket, density):
        everything = torch.arange(prod(piece.rows.shape))
        where = piece.place(everything)
        assert torch.equal(bucket.flat[where], piece.rows.reshape(-1)[everything])
        assert 1 <= piece.k <= piece.rows.shape[1]
        positions.append(where)
    assert torch.equal(torch.cat(positions).sort().values, torch.arange(bucket.flat.numel()))


@given(r=st.integers(1, 30), c=st.integers(1, 30), density=st.floats(0.001, 1.0))
@settings(max_examples=100)
def test_the_layer_budget_is_met_exactly_and_every_row_sends(r, c, density):
    got = torch.zeros(r, dtype=torch.int64)
    for step in range(r):
        pieces = list(by_row(bucket_of([[r, c]], step), density))
        kept = torch.zeros(r, dtype=torch.int64)
        for piece in pieces:
            first, last, _ = piece.block or (0, r, r)
            kept[first:last] += piece.k
        assert kept.sum() == max(r, budget(r * c, density))
        assert kept.min() >= 1
        assert kept.max() - kept.min() <= 1
        got += kept
    assert got.max() == got.min(), "over as many steps as rows, every row has had the same"


def test_matrix_view_of_a_convolution_is_output_channels():
    (piece,) = by_row(bucket_of([[6, 4, 3, 3]]), 0.001)
    assert piece.rows.shape == (6, 36)


@pytest.mark.parametrize(
    ("view", "rows"), [(by_dim1, (54, 4)), (by_dim0, (36, 6)), (by_longer, (36, 6))]
)
def test_the_published_row_rules(view, rows):
    """sparsifiers.md 1.2: dim1 ranks along the input channels of every spatial tap."""
    bucket = bucket_of([[6, 4, 3, 3]])
    (piece,) = view(bucket, 0.001)
    assert tuple(piece.rows.shape) == rows
    native = bucket.flat.view(6, 4, 3, 3)
    best = native.abs().amax(dim=1 if rows[1] == 4 else 0).reshape(-1)
    assert torch.equal(piece.rows.abs().amax(dim=1).sort().values, best.sort().values)


@pytest.mark.parametrize("view", [by_row, by_dim1, by_dim0])
def test_channels_last_rows_are_the_same_rows(view):
    torch.manual_seed(0)
    weight = torch.randn(6, 4, 3, 3)
    tensors = [weight, weight.to(memory_format=torch.channels_last)]
    rows = [next(view(Bucket.of({"w": t}, state={}), 0.001)).rows for t in tensors]
    if view is by_row:  # the same channels; the order inside one does not matter
        rows = [r.sort(dim=1).values for r in rows]
    assert torch.equal(rows[0], rows[1])


def test_of_copies_and_keeps_the_memory_order():
    weight = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    bucket = Bucket.of({"w": weight}, state={})
    assert torch.equal(bucket.layout.slots[0].view(bucket.flat), weight)
    bucket.flat.zero_()
    assert weight.abs().sum() > 0
    strided = torch.randn(8, 8)[:, ::2]
    assert torch.equal(Bucket.of({"w": strided}, state={}).flat.view(8, 4), strided)


@pytest.mark.parametrize("view", [by_row, by_dim1, by_dim0, by_longer])
def test_transposed_rows_are_the_same_rows(view):
    """Rows that interleave in memory are copied together, and lead back to where they were."""
    weight = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    bucket = Bucket.of({"w": weight.t().contiguous().t()}, state={})
    assert bucket.layout.slots[0].strides == (1, 4)
    (mine,), (theirs,) = view(bucket, 0.001), view(Bucket.of({"w": weight}, state={}), 0.001)
    assert torch.equal(mine.rows, theirs.rows)
    everything = torch.arange(24)
    assert torch.equal(bucket.flat[mine.place(everything)], mine.rows.reshape(-1))


def test_of_a_square_both_dimensions_are_as_long_and_rows_run_along_the_second():
    bucket = bucket_of([[5, 5]])
    (longer,), (dim1,) = by_longer(bucket, 0.001), by_dim1(bucket, 0.001)
    assert torch.equal(longer.rows, dim1.rows)


def test_budgets_are_rounded_and_never_nothing():
    assert [budget(10, d) for d in (0.001, 0.14, 0.15, 0.25, 0.96, 1.0)] == [1, 1, 2, 3, 10, 10]


def test_more_rows_are_lucky_in_turn():
    """Of ten rows five have one more: the first half in one step, the second in the next."""
    for step in range(4):
        lucky = {}
        for piece in by_row(bucket_of([[10, 8]], step), 15 / 80):
            lucky[piece.block[:2]] = piece.k
        assert lucky == ({(0, 5): 2, (5, 10): 1} if step % 2 == 0 else {(0, 5): 1, (5, 10): 2})


def test_the_whole_has_the_budgets_of_all_its_parameters():
    density = ByParameter.of({"p0": 0.5, "p1": 0.1})
    (piece,) = whole(bucket_of([[10, 2], [100]]), density)
    assert piece.k == 10 + 10


def test_the_rest_of_a_regions_budget_goes_round():
    """7 entries among 3 ranks: every region has 3 of them once in three steps."""
    given = []
    for step in range(3):
        bucket = replace(bucket_of([[10, 7]], step), world=3)
        given.append([piece.k for piece in by_region(bucket, 0.1)])
    assert sorted(given) == [[2, 2, 3], [2, 3, 2], [3, 2, 2]]


def test_whole_packs_around_gaps():
    bucket = bucket_of([[3, 4], [5], [2, 2]])
    slots = bucket.layout.slots
    gapped = replace(bucket, layout=Layout((slots[0], slots[2]), bucket.layout.numel))
    (piece,) = whole(gapped, 0.25)
    assert piece.rows.shape == (1, 16)
    assert piece.k == 4
    assert torch.equal(piece.place(torch.arange(16)), torch.tensor([*range(12), *range(17, 21)]))


def test_flat_indices():
    rows = torch.zeros(3, 5)
    assert flat_indices(torch.tensor([[0, 4], [1, 2], [3, 0]]), rows).tolist() == [
        0,
        4,
        6,
        7,
        13,
        10,
    ]


def test_a_sum_is_added_once_in_place():
    residual, grad = torch.ones(6), torch.arange(6.0)
    total = Sum(residual, grad, alpha=0.5)
    part = total[2:4]
    assert part.take().tolist() == [2.0, 2.5]
    assert part.take().tolist() == [2.0, 2.5]
    assert residual.tolist() == [1, 1, 2.0, 2.5, 1, 1]


def test_a_sum_leaves_out_what_is_not_finite():
    residual = torch.ones(4)
    total = Sum(residual, torch.tensor([1.0, float("nan"), float("inf"), -2.0]))
    total[0:4].take()
    assert residual.tolist() == [2, 1, 1, -1]
    assert not total.finite
