"""Numbers that change with the step."""

from __future__ import annotations

import pytest
import torch

from thinwire import Bucket, layout, recipes
from thinwire.collectives import OkTopk
from thinwire.combinators import dense_form, memories, remembers
from thinwire.comm import local
from thinwire.layout import Layout
from thinwire.memory import Residual
from thinwire.schedule import Flushed, Piecewise, Ramp, at, checked_density, dgc_ramp, stages
from thinwire.selectors.sidco import Sidco
from thinwire.selectors.threshold import Threshold


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


def test_a_flush_is_the_last_step():
    flushed = Flushed(Ramp(start=0.4, end=0.1, steps=2), 5)
    assert [flushed(step) for step in range(6)] == pytest.approx([0.4, 0.2, 0.1, 0.1, 1.0, 1.0])
    assert Flushed(0.1, 1)(0) == 1.0


@pytest.mark.parametrize("make", [
    lambda: Flushed(0.1, 0),
    lambda: Piecewise((10,), (0.1,)),
    lambda: Piecewise((20, 10), (0.1, 0.2, 0.3)),
    lambda: Ramp(start=0.0, end=0.1, steps=5),
    lambda: Ramp(start=0.1, end=0.1, steps=0),
])  # fmt: skip
def test_schedules_that_make_no_sense_are_refused(make):
    with pytest.raises(ValueError, match="got"):
        make()


@pytest.mark.parametrize("given", [0, -3, 1.0, "2", True, None])
@pytest.mark.parametrize(("name", "make"), [
    ("steps", lambda n: Flushed(0.1, n)),
    ("every", lambda n: stages((0.1, 0.2), n)),
    ("epochs", lambda n: dgc_ramp(0.1, n, 10)),
    ("refresh", lambda n: Threshold(refresh=n)),
    ("stages", lambda n: Sidco(stages=n)),
    ("chunk", lambda n: recipes.demo_dct(chunk=n)),
    ("block", lambda n: recipes.int8(block=n)),
    ("refresh", lambda n: OkTopk(refresh=n)),
])  # fmt: skip
def test_whole_numbers_are_whole(name, make, given):
    with pytest.raises(
        ValueError, match=f"{name} must be a whole number of at least 1, got .*give"
    ):
        make(given)
    assert make(1) is not None


@pytest.mark.parametrize("density", [0, 0.0, -1, 1.5, float("nan"), "0.1", True, None])
def test_densities_that_make_no_sense_are_refused(density):
    with pytest.raises(ValueError, match=r"density must be in \(0, 1\], got"):
        checked_density(density)


@pytest.mark.parametrize("density", [
    Ramp(start=2.0, end=0.1, steps=5),
    Ramp(start=0.1, end=2.0, steps=5),
    Piecewise((5,), (0.1, 2.0)),
    {"w": 0.1, "": Ramp(start=0.1, end=2.0, steps=5)},
])  # fmt: skip
def test_a_density_that_will_make_no_sense_is_refused_at_once(density):
    with pytest.raises(ValueError, match=r"density must be in \(0, 1\], got 2\.0"):
        recipes.topk(density=density)


def test_dgcs_ramp_by_formula_and_by_list():
    """density ** ((e + 1) / 6) in the five epochs of a ramp to 0.001; or the paper's own list."""
    ramp = dgc_ramp(0.001, epochs=5, every=100)
    formula = [0.316, 0.1, 0.0316, 0.01, 0.00316, 0.001]
    assert [ramp(100 * e + 99) for e in range(6)] == pytest.approx(formula, rel=2e-3)
    listed = stages((0.25, 0.0625, 0.015625, 0.004, 0.001), every=10)
    assert [listed(10 * e) for e in range(5)] == [0.25, 0.0625, 0.015625, 0.004, 0.001]
    assert listed(10**6) == 0.001
    with pytest.raises(ValueError, match="every must be a whole number of at least 1, got 0"):
        stages((0.1, 0.2), every=0)


def test_dgc_takes_a_ramp():
    by_list = recipes.dgc(0.001, ramp=[0.25, 0.0625, 0.015625, 0.004], every=10).inner.density
    matrix, vector = Layout.of({"w": torch.empty(3, 4), "b": torch.empty(3)}).slots
    assert [by_list.at(matrix, s) for s in (0, 9, 10, 40)] == [0.25, 0.25, 0.0625, 0.001]
    assert by_list.at(vector, 40) == 1.0
    by_formula = recipes.dgc(0.001, ramp=5, every=10).inner.density
    assert by_formula.rules == ((layout.vectors, 1.0), ("", dgc_ramp(0.001, 5, 10)))
    everything = recipes.dgc({"": 0.001}).inner.density
    assert everything.at(vector, 0) == 0.001
    with pytest.raises(ValueError, match="a ramp ends at one density"):
        recipes.dgc(lambda step: 0.1, ramp=5, every=10)
    with pytest.raises(ValueError, match="every must be a whole number of at least 1"):
        recipes.dgc(0.001, ramp=5)


def test_schedules_can_be_written_on_the_command_line():
    written = recipes.parse("topk(density=Ramp(start=0.25, end=0.01, steps=500))")
    assert written == recipes.topk(density=Ramp(start=0.25, end=0.01, steps=500))
    named = recipes.parse("topk(density={'bias': 1.0, '': Ramp(start=0.25, end=0.01, steps=500)})")
    ramp = Ramp(start=0.25, end=0.01, steps=500)
    assert named == recipes.topk(density={"bias": 1.0, "": ramp})
    assert recipes.parse("topk(density={small: 1.0, '': 0.01})") == recipes.topk(
        density={layout.small: 1.0, "": 0.01}
    )
    assert recipes.parse("powersgd(rank=stages((1, 4), 100))").inner.frame.rank(150) == 4
    with pytest.raises(ValueError, match="must be literals, schedules"):
        recipes.parse("topk(density=eval('1'))")
    memory = recipes.parse("topk(memory=Residual(decay=Ramp(start=1.0, end=0.9, steps=5)))").memory
    assert memory == Residual(decay=Ramp(start=1.0, end=0.9, steps=5))
    with pytest.raises(ValueError, match="missing a required"):
        recipes.parse("topk(density=Ramp(start=0.25))")


def test_any_number_of_any_recipe_may_be_a_schedule():
    """Also where the part it goes to knows nothing of steps: what is built follows the step."""
    moving = recipes.qsgd(bits=stages((8, 4), 10))
    assert moving.at(0) == recipes.qsgd(bits=8)
    assert moving.at(10) == recipes.qsgd(bits=4)
    assert recipes.threshold(value=lambda step: 0.1 * step).at(3).inner.pick.estimate.value == (
        pytest.approx(0.3)
    )
    assert recipes.int8(block=stages((64, 256), 5), memory="none").at(7) == recipes.int8(
        block=256, memory="none"
    )
    assert recipes.parse("terngrad(clip=Ramp(start=4.0, end=2.0, steps=10))").at(10) == (
        recipes.terngrad(clip=2.0)
    )
    assert remembers(moving) and not remembers(recipes.int8(block=lambda s: 64, memory="none"))
    assert memories(recipes.dgc(sample=lambda step: 0.01))[0].corrects_momentum
    assert dense_form(moving).at(10) == dense_form(recipes.qsgd(bits=4))


def test_a_schedule_that_starts_badly_is_refused_at_once():
    with pytest.raises(ValueError, match="bits must be 2, 4 or 8, got 3"):
        recipes.qsgd(bits=lambda step: 3)
    with pytest.raises(ValueError, match="warmup must be a whole number"):
        recipes.qsgd(warmup=lambda step: 3)


def test_a_residual_outlives_a_change_of_bits():
    recipe, state = recipes.qsgd(bits=stages((8, 2), 3), block=64), {}

    def worker(comm):
        total = torch.zeros(64)
        for step in range(6):
            grads = {"w": torch.linspace(-1, 1, 64)}
            total += recipe.reduce(Bucket.of(grads, state=state, step=step), comm).mean
        return total + state["slots"]["w"]["memory"]["residual"]

    assert torch.allclose(local.run(1, worker)[0], 6 * torch.linspace(-1, 1, 64), atol=1e-4)
