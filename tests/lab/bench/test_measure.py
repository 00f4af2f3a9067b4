"""What a plan measures: a schedule at its mean, not at its first steps."""

from __future__ import annotations

import pytest

from thinwire_lab.bench.measure import Question, ask


@pytest.mark.slow
def test_a_ramp_is_measured_at_its_mean():
    ramp = "topk(density=Ramp(start=0.5, end=0.01, steps=10))"
    calls = ("dense()", ramp, "topk(density=0.01)")
    found = ask(Question(model="small", batch=2, recipes=calls, steps=10_000), 2)
    ramped, flat = (sum(cost.sent for cost in found.costs[call]) for call in calls[1:])
    assert ramped == pytest.approx(flat, rel=0.05)
