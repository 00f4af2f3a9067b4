"""Where parameters lie: memory orders, what is a matrix, what is small."""

from __future__ import annotations

import pytest
import torch

from thinwire.layout import Layout, memory_strides, small, vectors


def slot(*shape, like=None):
    return Layout.of({"p": torch.empty(shape) if like is None else like}).slots[0]


def test_a_matrix_has_a_row_for_each_index_of_what_lies_outermost():
    assert slot(2, 3, 4).matrix == (2, 12)
    assert slot(like=torch.empty(3, 2).t()).matrix == (3, 2), "transposed: dimension 1"
    assert slot(5).matrix == (1, 5) and slot().matrix == (1, 1) and slot(0, 3).matrix == (1, 0)


def test_dimensions_of_size_one_have_any_stride():
    """As PyTorch has it: such a tensor fills its memory, and keeps its strides."""
    assert memory_strides(torch.empty_strided((1, 4), (99, 1))) == (99, 1)
    assert memory_strides(torch.empty_strided((2, 4), (99, 1))) == (4, 1)
    assert memory_strides(torch.empty(8, 8)[:, :1]) == (1, 1)


@pytest.mark.parametrize(
    ("shape", "vector", "little"),
    [((), True, True), ((5000,), True, True), ((5000, 1), True, True), ((64, 1, 1), True, True),
     ((1, 64), False, True), ((25, 40), False, True), ((7, 143), False, False)],
)  # fmt: skip
def test_vectors_have_one_entry_a_row_and_small_is_up_to_a_thousand(shape, vector, little):
    assert (vectors(slot(*shape)), small(slot(*shape))) == (vector, little)


def test_runs_join_neighbours_and_leave_gaps():
    whole = Layout.of({name: torch.empty(4) for name in "abcd"} | {"e": torch.empty(0)})
    assert whole.runs == ((0, 16),) and whole.size == 16
    a, _, c, d, e = whole.slots
    assert Layout((a, c, d, e), 16).runs == ((0, 4), (8, 16))
    assert Layout((a, c, d, e), 16).fingerprint != whole.fingerprint
