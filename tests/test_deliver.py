"""What `pause()` attaches sends all that waits in one step: every recipe, in every nesting."""

from __future__ import annotations

import inspect

import pytest
import torch

from thinwire import Bucket, recipes
from thinwire.choose import Choose, Fastest
from thinwire.combinators import Alternate, Remember, Route, Warmup, Watch, dense, dense_form
from thinwire.comm import local
from thinwire.memory import MomentumCorrected, Residual
from thinwire.reducers import Select
from thinwire.schedule import stages
from thinwire.selectors.topk import topk

SHAPES = {"w": (12, 10), "b": (10,)}
HELD = 3  # steps in which something is held back


def is_b(slot):
    return slot.name == "b"


def other():
    return Remember(Select(pick=topk, density=0.05))


NESTINGS = {
    "bare": lambda r: r,
    "warmup": lambda r: Warmup(1, r),
    "watch": lambda r: Watch(inner=r, probe=lambda *seen: None),
    "route, yes": lambda r: Route(is_b, r, other()),
    "route, no": lambda r: Route(is_b, dense(), r),
    "alternate, first": lambda r: Alternate(r, other()),
    "alternate, second": lambda r: Alternate(dense(), r, (1, 2)),
    "alternate in alternate": lambda r: Alternate(Alternate(r, other()), Warmup(1, r)),
    "watch, route, warmup": lambda r: Watch(
        inner=Route(is_b, dense(), Warmup(2, r)), probe=lambda *seen: None
    ),
}
SPECIAL = [
    recipes.qsgd(bits=stages((8, 4), 2), block=16),
    recipes.dgc(sample=lambda step: 0.5, density=0.05),
    recipes.topk(0.05, collective="two_level(2)"),
    recipes.adtopk(0.05, partial=True),
    recipes.adtopk(0.05, no_feedback=["b"]),
    recipes.gtopk(0.05, no_feedback=["b"], partial=True),
    recipes.powersgd(2, dense=["b"]),
    recipes.auto(0.05, tries=3),
    recipes.topk(0.05, memory=Residual(decay=0.5)),
    recipes.topk(0.05, memory=MomentumCorrected(masking="never")),
]


def named(name):
    recipe = getattr(recipes, name)
    thin = {"density": 0.05} if "density" in inspect.signature(recipe).parameters else {}
    return recipe(**thin)


def grads(rank, step):
    draw = torch.Generator().manual_seed(100 * step + rank)
    return {name: torch.randn(shape, generator=draw) for name, shape in SHAPES.items()}


def waiting(state):
    """The largest entry of any residual, wherever a memory keeps it."""
    residuals = [
        values["residual"]
        for parts in state.get("slots", {}).values()
        for values in parts.values()
        if "residual" in values
    ]
    return max((float(r.abs().max()) for r in residuals), default=0.0)


def delivered(recipe, paused=None):
    """What waits before the step that delivers and after it; that step's mean and our share."""

    def worker(comm):
        state = {}
        for step in range(HELD):
            recipe.reduce(Bucket.of(grads(comm.rank, step), state=state, step=step), comm)
        before = waiting(state)
        bucket = Bucket.of(grads(comm.rank, HELD), state=state, step=HELD)
        reduced = dense_form(paused or recipe).reduce(bucket, comm)
        after, mean = waiting(state), reduced.mean.clone()
        sent = reduced.sent.add_into(torch.zeros(mean.numel()))
        if reduced.undo is not None:
            reduced.undo()
        return before, after, mean, sent, waiting(state)

    results = local.run(2, worker)
    means = [mean for _, _, mean, _, _ in results]
    assert torch.equal(*means), "replicas differ"
    law = sum(sent for _, _, _, sent, _ in results) / 2
    assert torch.allclose(means[0], law, atol=1e-5), "the mean is not what was sent"
    return results


@pytest.mark.parametrize("nesting", NESTINGS)
@pytest.mark.parametrize("name", recipes.names())
def test_nothing_waits_after_one_step(name, nesting):
    for _, after, _, _, _ in delivered(NESTINGS[nesting](named(name))):
        assert after == 0.0


@pytest.mark.parametrize("nesting", NESTINGS)
def test_nothing_waits_of_special_recipes_either(nesting):
    for recipe in SPECIAL:
        for _, after, _, _, _ in delivered(NESTINGS[nesting](recipe)):
            assert after == 0.0, recipe


@pytest.mark.parametrize("nesting", NESTINGS)
def test_something_did_wait_and_a_step_that_is_undone_leaves_it_waiting(nesting):
    for before, after, _, _, undone in delivered(NESTINGS[nesting](named("topk"))):
        assert before > 0 and after == 0 and undone > 0


def test_a_warm_up_that_is_not_over_delivers_what_a_loaded_state_holds():
    recipe = other()
    for before, after, mean, _, _ in delivered(recipe, paused=Warmup(99, recipe)):
        assert before > 0 and after == 0
        everything = sum(grads(rank, HELD)["w"] for rank in (0, 1)).reshape(-1) / 2
        assert not torch.allclose(mean[:120], everything), "more than this step's gradient"


@pytest.mark.parametrize("nesting", ["alternate, first", "route, no", "warmup"])
def test_all_that_waited_is_in_the_mean(nesting):
    """Means of all steps add up to the average of all gradients: nothing is sent twice."""
    recipe = NESTINGS[nesting](other())

    def worker(comm):
        state, total = {}, torch.zeros(130)
        for step in range(HELD + 1):
            form = recipe if step < HELD else dense_form(recipe)
            bucket = Bucket.of(grads(comm.rank, step), state=state, step=step)
            total += form.reduce(bucket, comm).mean
        return total

    flat = [torch.cat([g.reshape(-1) for g in grads(rank, step).values()])
            for rank in (0, 1) for step in range(HELD + 1)]  # fmt: skip
    for total in local.run(2, worker):
        assert torch.allclose(total, sum(flat) / 2, atol=1e-5)


def test_a_branch_that_has_no_turn_hands_over_what_it_holds_and_no_momentum():
    """Its momentum neither fades nor is sent: it is nobody's turn."""
    corrected = recipes.topk(0.05, memory=MomentumCorrected(masking="never"))
    recipe, state = Alternate(corrected, dense(), (HELD, 1)), {}

    def worker(comm):
        for step in range(HELD):
            recipe.reduce(Bucket.of(grads(0, step), state=state, step=step), comm)
        momentum = state["slots"]["w"]["first/memory"]["momentum"].clone()
        held = state["slots"]["w"]["first/memory"]["residual"].clone()
        bucket = Bucket.of(grads(0, HELD), state=state, step=HELD)
        return momentum, held, dense_form(recipe).reduce(bucket, comm).mean

    ((momentum, held, mean),) = local.run(1, worker)
    assert torch.equal(state["slots"]["w"]["first/memory"]["momentum"], momentum)
    assert momentum.any() and torch.allclose(mean[:120], (grads(0, HELD)["w"] + held).reshape(-1))


def test_a_step_that_is_not_finite_delivers_nothing():
    recipe = Alternate(other(), other())

    def worker(comm):
        state = {}
        for step in range(HELD + 1):
            recipe.reduce(Bucket.of(grads(comm.rank, step), state=state, step=step), comm)
        held = state["slots"]["w"]["second/memory"]["residual"].clone()
        bad = grads(comm.rank, HELD + 1)
        bad["w"][0, 0] = float("nan" if comm.rank else "1.0")
        bucket = Bucket.of(bad, state=state, step=HELD + 1)  # an even one: the first has its turn
        reduced = dense_form(recipe).reduce(bucket, comm)
        assert not reduced.finite and reduced.sent.entries == 0
        assert not reduced.mean.isfinite().all()
        return held, state["slots"]["w"]["second/memory"]["residual"]

    for held, after in local.run(2, worker):
        assert held.any() and torch.allclose(held, after, atol=1e-6)


def test_a_memory_inside_a_choice_or_a_memory_is_refused():
    with pytest.raises(ValueError, match="keep what the next choice has to send"):
        Choose(choices=(("a", dense()), ("b", other())), decide=Fastest())
    with pytest.raises(ValueError, match="count everything twice"):
        Remember(Alternate(dense(), Route(is_b, dense(), other())))
