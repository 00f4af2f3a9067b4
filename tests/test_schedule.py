"""Numbers that change with the step."""

from __future__ import annotations

import pytest

from thinwire.schedule import Piecewise, Ramp, at, checked_density


def test_at():
    assert at(0.5, 3) == 0.5
    assert at(lambda step: step * 2.0, 3) == 6.0


@pytest.mark.parametrize(
    ("step", "value"), [(0, 0.25), (9, 0.25), (10, 0.05), (19, 0.05), (20, 0.01)]
)
def test_piecewise(step, value):
    assert Piecewise((10, 20), (0.25, 0.05, 0.01))(step) == value


def test_ramp():
    ramp = Ramp(start=0.25, end=0.01, steps=100)
    assert ramp(0) == 0.25
    assert ramp(50) == pytest.approx(0.05)
    assert ramp(100) == ramp(1000) == pytest.approx(0.01)


@pytest.mark.parametrize("make", [
    lambda: Piecewise((10,), (0.1,)),
    lambda: Piecewise((20, 10), (0.1, 0.2, 0.3)),
    lambda: Ramp(start=0.0, end=0.1, steps=5),
    lambda: Ramp(start=0.1, end=0.1, steps=0),
])  # fmt: skip
def test_schedules_that_make_no_sense_are_refused(make):
    with pytest.raises(ValueError, match="got"):
        make()


@pytest.mark.parametrize("density", [0, 0.0, -1, 1.5, float("nan"), "0.1", True, None])
def test_densities_that_make_no_sense_are_refused(density):
    with pytest.raises(ValueError, match=r"density must be in \(0, 1\], got"):
        checked_density(density)
