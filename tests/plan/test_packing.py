"""Plans of buffers: every rule on cases small enough to follow, and what holds for all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.plan.packing import (
    by_bytes,
    by_count,
    groups,
    merge,
    merge_sparse,
    overlap,
)


def line(alpha, beta):
    return lambda n: alpha + beta * n


def test_fixed_counts_and_caps():
    assert by_count(7, 3) == [3, 3, 1]
    assert by_count(0, 3) == []
    assert by_bytes([4, 4, 4, 9, 1, 1], 8) == [2, 1, 1, 2]
    assert by_bytes([100], 8) == [1]
    for bad in (lambda: by_count(3, 0), lambda: by_bytes([1], 0)):
        with pytest.raises(ValueError, match="got 0"):
            bad()


def test_mg_wfbp_merges_what_is_ready_before_the_network_is():
    sizes = [10, 10, 10]
    # free network and long gaps: one at a time
    assert merge(sizes, [1, 5, 9], line(0.5, 0.1)) == [1, 1, 1]
    # a message costs more than waiting for the next gradient
    assert merge(sizes, [1, 1.2, 1.4], line(0.5, 0.1)) == [3]
    # the second is sent while the third comes, which then goes alone
    assert merge(sizes, [1, 5, 5.2], line(0.5, 0.1)) == [1, 2]
    # the network is busy with the first until 12: what comes until then goes together
    assert merge([100, 10, 10, 10], [1, 5, 9, 20], line(1, 0.1)) == [1, 2, 1]


def test_omgs_counts_what_selection_costs():
    sizes, ready = [10, 10], [1.0, 2.0]
    assert merge_sparse(sizes, ready, line(0, 0), line(2, 0.1)) == [2]
    assert merge_sparse(sizes, ready, line(0, 0), line(0.5, 0.1)) == [1, 1]
    # one selection of both costs more than two of one each: no longer worth the message
    assert merge_sparse(sizes, ready, lambda n: 0.01 * n * n, line(2, 0.1)) == [1, 1]


def test_omgs_knows_how_long_the_network_is_busy():
    """The first is selected until 11 and sent until 22; what is there by then goes together."""
    sizes, select, send = [100, 10, 10], line(0, 0.1), line(1, 0.1)
    assert merge_sparse(sizes, [1.0, 3.0, 21.9], select, send) == [1, 2]
    assert merge_sparse(sizes, [1.0, 3.0, 22.1], select, send) == [1, 1, 1]


def test_buffers_fill_while_the_one_before_is_sent():
    ready = [float(i) for i in range(1, 9)]
    assert overlap([10] * 8, ready, line(0, 0), line(0, 0.01)) == [1] * 8
    counts = overlap([10] * 8, ready, line(0, 0), line(0, 0.3))
    assert counts[0] == 1 and counts[1] >= 3 and sum(counts) == 8


def test_filling_a_buffer_takes_its_selection_too():
    """Sending takes 3: three gradients fill it, or two and the time of selecting them."""
    sizes, ready = [10] * 6, [float(i) for i in range(1, 7)]
    assert overlap(sizes, ready, line(0, 0), line(3, 0)) == [1, 3, 2]
    assert overlap(sizes, ready, line(0, 0.1), line(3, 0)) == [1, 2, 2, 1]


TENSORS = st.lists(st.tuples(st.integers(1, 10**6), st.floats(1e-6, 1e-2)), min_size=1, max_size=30)


@given(TENSORS, st.floats(0, 1e-2), st.floats(1e-10, 1e-8), st.floats(0, 1e-8))
def test_every_plan_holds_every_gradient_once(tensors, alpha, beta, select):
    sizes = [size for size, _ in tensors]
    ready = [sum(gap for _, gap in tensors[: i + 1]) for i in range(len(tensors))]
    names = [f"p{i}" for i in range(len(tensors))]
    send, pick = line(alpha, beta), line(1e-5, select)
    for counts in (
        by_count(len(sizes), 4),
        by_bytes(sizes, 1e6),
        merge(sizes, ready, send),
        merge_sparse(sizes, ready, pick, send),
        overlap(sizes, ready, pick, send),
    ):
        assert [name for group in groups(names, counts) for name in group] == names


def test_a_plan_of_another_model_is_refused():
    for counts in ([2], [3, 1], [0, 3]):
        with pytest.raises(ValueError, match="plan again"):
            groups(["a", "b", "c"], counts)
