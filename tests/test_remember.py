"""Remember beside other branches: units and flags stay within one's own slots."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from thinwire import Bucket, recipes
from thinwire.combinators import InBasis, Remember, Route, dense
from thinwire.comm import local
from thinwire.frames.dct import Dct
from thinwire.memory import MomentumCorrected, Residual
from thinwire.payload import Dense, bound
from thinwire.protocols import Reduced
from thinwire.reducers import Select
from thinwire.selectors.topk import topk

SHAPES = {"head": (4, 6), "body": (5, 8), "tail": (7,)}


def is_head(slot):
    return slot.name == "head"


def grads(rank, step):
    draw = torch.Generator().manual_seed(10 * step + rank)
    return {name: torch.randn(shape, generator=draw) for name, shape in SHAPES.items()}


def steps(recipe, scale, world=3, rates=None):
    """The means in the gradient's own units, and everyone's share, of three steps."""

    def worker(comm):
        state, found = {}, []
        for step in range(3):
            bucket = Bucket.of(grads(comm.rank, step), state=state, step=step)
            bucket = replace(bucket, flat=bucket.flat * scale, scale=scale, rates=rates)
            reduced = recipe.reduce(bucket, comm)
            sent = reduced.sent.add_into(torch.zeros(bucket.layout.numel))
            found.append((reduced.mean / scale, sent))
        return found

    return local.run(world, worker)


RECIPES = {
    "no feedback": recipes.adtopk(density=0.3, no_feedback=["head"]),
    "two memories": Route(is_head, recipes.topk(0.2), recipes.topk(0.4)),
    "momentum": Route(is_head, dense(), recipes.dgc(0.4)),
    "both": Route(is_head, recipes.topk(0.2, memory="momentum"), recipes.topk(0.4)),
    "half outside": Route(is_head, recipes.half(), recipes.topk(0.3)),
}


@pytest.mark.parametrize("name", RECIPES)
def test_a_loss_scale_changes_nothing_in_any_branch(name):
    plain, scaled = steps(RECIPES[name], 1.0), steps(RECIPES[name], 1024.0)
    for rank in range(3):
        for (mean, _), (other, _) in zip(plain[rank], scaled[rank], strict=True):
            assert torch.allclose(mean, other, atol=1e-6)
    for step in range(3):
        average = sum(plain[rank][step][1] for rank in range(3)) / 3
        assert torch.allclose(plain[0][step][0], average, atol=1e-6)


@pytest.mark.parametrize("first", [0, 1])
def test_a_learning_rate_stays_in_its_branch(first):
    rated = recipes.topk(0.5, memory=Residual(learning_rate=True))
    pair = (rated, recipes.topk(0.5))
    recipe = Route(is_head, pair[first], pair[1 - first])
    means = steps(recipe, 1.0, rates={"head": 0.01, "body": 0.5, "tail": 0.1})
    plain = steps(Route(is_head, recipes.topk(0.5), recipes.topk(0.5)), 1.0)
    assert torch.allclose(means[0][0][0], plain[0][0][0], atol=1e-6), "one step: rates cancel"


def test_a_branch_without_entries_can_still_abort():
    recipe = Remember(Route(lambda slot: slot.name == "b", dense(), Select(pick=topk)))

    def worker(comm):
        bad = float("nan") if comm.rank == 0 else 1.0
        tensors = {"b": torch.tensor([bad, 1.0, 1.0]), "e": torch.zeros(0, 4)}
        return recipe.reduce(Bucket.of(tensors, state={}, step=0), comm).finite

    assert local.run(2, worker) == [False, False]


def test_no_memory_inside_another_basis():
    with pytest.raises(ValueError, match="put Remember outside"):
        InBasis(Dct(8), recipes.topk())
    Remember(InBasis(Dct(8), Select(pick=topk)), MomentumCorrected())


class Overflowing:
    """Somebody's reducer whose mean is not finite, and which does not say so."""

    def reduce(self, bucket, comm):
        x = bucket.take()
        return Reduced(mean=torch.full_like(x, float("inf")), sent=Dense(x.clone()))


def test_a_mean_that_is_not_finite_is_never_committed():
    state = {}
    bucket = Bucket.of({"w": torch.ones(5)}, state=state)
    reduced = Remember(Overflowing()).reduce(bucket, local.run(1, lambda comm: comm)[0])
    assert not reduced.finite
    assert state["slots"]["w"]["memory"]["residual"].tolist() == [1.0] * 5


def test_a_dense_sum_is_bounded_without_being_taken_for_infinite():
    """Its squares overflow long before it does."""
    assert 1e30 <= bound(Dense(torch.full((10,), 1e30))) < float("inf")
    assert 3.0 <= bound(Dense(torch.tensor([1.0, -3.0]))) <= 3.2
    for bad in (float("nan"), float("inf")):
        assert bound(Dense(torch.tensor([1.0, bad]))) == float("inf")


def test_only_what_no_sum_can_hold_is_dropped_and_that_is_said(caplog):
    """Two ranks at 3e38: their sum overflows; on each that entry goes, and the others wait."""
    recipe = recipes.gtopk(density=0.5, memory=MomentumCorrected(masking="never"))

    def worker(comm):
        state = {}
        grads = {"w": torch.tensor([3e38, 1.0, 1e20, -2.0])}
        finite = recipe.reduce(Bucket.of(grads, state=state), comm).finite
        return finite, state["slots"]["w"]["memory"]

    for finite, memory in local.run(2, worker):
        assert not finite
        assert memory["residual"].tolist() == memory["momentum"].tolist()
        assert memory["residual"].tolist() == pytest.approx([0.0, 1.0, 1e20, -2.0])
    assert [r.getMessage() for r in caplog.records] == [
        "step 0 could not be sent: 2 entries that waited were too large for any sum of 2 ranks, "
        "and are dropped"
    ] * 2


def test_rates_and_the_loss_scale_count():
    """Under a rate of 1e-5 and a loss scale of 2^16 a mean is 6.5e9 times what waits: 1e30 is too
    much, and after a step that says so it is gone."""
    recipe = recipes.topk(1.0, memory=Residual(learning_rate=True))

    def worker(comm):
        state = {"slots": {"w": {"memory": {"residual": torch.full((4,), 1e30)}}}}
        found = []
        for step in range(2):
            bucket = Bucket.of({"w": torch.ones(4)}, state=state, step=step)
            bucket = replace(bucket, scale=2.0**16, rates={"w": 1e-5})
            found.append(recipe.reduce(bucket, comm).finite)
        return found

    assert local.run(2, worker) == [[False, True]] * 2
