"""Replay of a step: by hand, and what holds for any."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.plan.timeline import Work, replay


def test_nothing_to_exchange():
    step = replay([Work(backward=2.0), Work(backward=3.0)], forward=1.0, optimizer=0.5)
    assert step.step == pytest.approx(6.5)
    assert step.exposed == step.idle == 0


def test_an_exchange_hides_behind_the_next_backward():
    works = [Work(backward=2, select=1, wire=3, scatter=1), Work(backward=10, wire=2)]
    step = replay(works, forward=1)
    # first: ready at 3, sent 4-7, written 8; second: ready at 13, sent until 15
    assert step.step == pytest.approx(15)
    assert step.exposed == pytest.approx(2)
    assert step.idle == pytest.approx(6)


def test_the_lane_takes_one_bucket_at_a_time():
    works = [Work(backward=1, wire=5, scatter=1), Work(backward=1, wire=5)]
    assert replay(works).step == pytest.approx(1 + 5 + 1 + 5)


def test_two_threads_on_one_core_share_it():
    works = [Work(backward=2, select=2), Work(backward=2)]
    assert replay(works, cores=2).step == pytest.approx(4)
    assert replay(works, cores=1).step == pytest.approx(6)
    assert replay(works, cores=0.5).step == pytest.approx(12)


def test_an_exchange_needs_both_its_wire_and_its_processor():
    assert replay([Work(backward=1, wire=4, effort=1)], cores=1).step == pytest.approx(5)
    assert replay([Work(backward=1, wire=1, effort=4)], cores=1).step == pytest.approx(5)
    # while it takes the core, backward has only half of one
    works = [Work(backward=1, wire=4, effort=1), Work(backward=2)]
    assert replay(works, cores=1).step == pytest.approx(5)


def test_waiting_for_the_wire_takes_no_processor():
    """Backward has the core to itself but for the second of the exchange's own work."""
    works = [Work(backward=1, wire=4, effort=1), Work(backward=4)]
    assert replay(works, cores=1).step == pytest.approx(6)
    assert replay([Work(backward=1, wire=4), Work(backward=4)], cores=1).step == pytest.approx(5)


SECONDS = st.floats(0, 10)
WORKS = st.lists(
    st.builds(
        Work, backward=SECONDS, select=SECONDS, wire=SECONDS, effort=SECONDS, scatter=SECONDS
    ),
    max_size=6,
)


@given(WORKS, SECONDS, SECONDS, st.sampled_from([0.25, 0.5, 1.0, 2.0, math.inf]))
def test_no_step_is_shorter_than_its_parts_or_longer_than_their_sum(works, forward, last, cores):
    step = replay(works, forward=forward, optimizer=last, cores=cores)
    speed = min(1.0, cores)
    main = forward + last + sum(w.backward for w in works)
    lane = sum(w.select + max(w.wire, w.effort) + w.scatter for w in works)
    every = main + sum(w.select + w.effort + w.scatter for w in works)
    slack = 1e-6 * (1 + every / speed)
    assert step.step >= max(main / speed, every / cores, lane) - slack
    assert step.step <= (every / speed) + sum(w.wire for w in works) + slack
    assert 0 <= step.exposed <= step.step + slack
    ends = [span.end for span in step.spans]
    assert max(ends) == pytest.approx(step.step)
    for where in ("main", "lane", "network"):
        mine = [span for span in step.spans if span.where == where]
        for before, after in pairwise(mine):
            assert before.end <= after.begin + slack


def test_no_cores_is_an_error():
    with pytest.raises(ValueError, match="above 0"):
        replay([Work(backward=1)], cores=0)
