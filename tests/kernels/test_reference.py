"""The reference kernels against the most obvious code there is."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire import kernels
from thinwire.kernels.reference import select, sparse


def obvious_topk(rows: torch.Tensor, k: int) -> list[int]:
    chosen = []
    for r, row in enumerate(rows.tolist()):
        order = sorted(range(len(row)), key=lambda i: (-abs(row[i]), i))
        chosen += [r * len(row) + i for i in sorted(order[:k])]
    return chosen


@given(
    values=st.lists(
        st.sampled_from([-2.0, -1.0, -0.0, 0.0, 1.0, 2.0, 3.5]), min_size=1, max_size=40
    ),
    c=st.integers(1, 8),
    k=st.integers(1, 8),
)
@settings(max_examples=200)
def test_topk_takes_the_largest_and_of_equals_the_first(values, c, k):
    rows = torch.tensor((values * c)[: len(values) // c * c or c]).view(-1, c)
    k = min(k, c)
    assert kernels.topk(rows, k).tolist() == obvious_topk(rows, k)


def test_topk_of_many_distinct_values():
    rows = torch.randn(50, 333)
    assert kernels.topk(rows, 7).tolist() == obvious_topk(rows, 7)


def test_topk_never_hides_a_nan():
    rows = torch.tensor([[1.0, float("nan"), 3.0, float("inf")], [4.0, 3.0, 2.0, float("nan")]])
    assert kernels.topk(rows, 1).tolist() == [1, 7]


def test_accumulate():
    residual = torch.tensor([1.0, 2.0])
    assert kernels.accumulate(residual, torch.tensor([1.0, 1.0]), 0.5)
    assert residual.tolist() == [1.5, 2.5]
    assert not kernels.accumulate(residual, torch.tensor([float("nan"), 1.0]))
    assert residual.tolist() == [1.5, 3.5]
    assert kernels.accumulate(torch.zeros(0), torch.zeros(0))


def test_accumulate_takes_half_precision_gradients():
    residual = torch.zeros(3)
    assert kernels.accumulate(residual, torch.ones(3, dtype=torch.bfloat16))
    assert residual.tolist() == [1, 1, 1]


def test_accumulate_holds_an_overflow_at_the_largest_number():
    residual = torch.tensor([3e38, -3e38])
    select.accumulate(residual, torch.tensor([3e38, -3e38]))
    assert residual.tolist() == [torch.finfo().max, -torch.finfo().max]


def test_positions_end_before_the_bound():
    assert sparse.ascending(torch.tensor([0, 8]), 9)
    assert not sparse.ascending(torch.tensor([0, 9]), 9)
    assert not sparse.ascending(torch.tensor([-1, 8]), 9)


def test_finite():
    assert kernels.finite(torch.tensor([1.0, 3e38]))
    assert kernels.finite(torch.zeros(0))
    assert not kernels.finite(torch.tensor([1.0, float("nan")]))
    assert not kernels.finite(torch.tensor([1.0, -float("inf")]))
