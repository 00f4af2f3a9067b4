"""Options that recipes share: every one of them with every recipe that takes it keeps the law."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.contracts.test_contracts import NUMEL, Outcome, close, take_step
from thinwire import layout, recipes
from thinwire.choose import Choose
from thinwire.describe import parts
from thinwire.memory import Residual
from thinwire.protocols import Reducer
from thinwire.recipes.recipe import list_options
from thinwire.selectors.drift import Drifting

WORLD = 3
CONV = slice(24 * 40 + 24, 24 * 40 + 24 + 144)
TAKES = {
    name: {option.name for option in list_options(getattr(recipes, name))}
    for name in recipes.names()
}
SPARSE = [name for name in recipes.names() if "partial" in TAKES[name]]
SHARING = [name for name in recipes.names() if "dense" in TAKES[name]]
ESTIMATED: dict[str, dict[str, Any]] = {
    "topk": {}, "gtopk": {}, "topkdsa": {}, "slots": {}, "adtopk": {"interleave": True},
}  # fmt: skip


def built(name: str, **more: Any) -> Reducer:
    thin = {"density": 0.05} if "density" in TAKES[name] else {}
    usual = {"memory": "residual"} if name in ("half", "bf16") else {}
    recipe: Reducer = getattr(recipes, name)(**thin, **(usual | more))
    return recipe


def train(recipe: Reducer, steps: int, fed: slice = slice(None)) -> list[list[Outcome]]:
    """Steps that keep the law: equal means, their average, and nothing lost where it is fed."""
    states: list[dict[str, Any]] = [{} for _ in range(WORLD)]
    seen = []
    for step in range(steps):
        outcomes = take_step(recipe, WORLD, states, step)
        sizes = torch.cat([o.x for o in outcomes])
        assert all(torch.equal(o.mean, outcomes[0].mean) for o in outcomes)
        average = sum(o.sent.double() for o in outcomes) / WORLD
        assert close(outcomes[0].mean, average, sizes)
        for o in outcomes:
            assert o.residual is not None
            total = (o.sent.double() + o.residual.double())[fed]
            assert close(o.x[fed], total, torch.cat([o.x, o.sent]))
        seen.append(outcomes)
    return seen


def test_every_sparse_recipe_shares_the_same_options() -> None:
    shared = {"collective", "memory", "wire", "warmup", "dense", "no_feedback"}
    assert all(TAKES[name] >= shared | {"partial", "estimate"} for name in SPARSE)
    assert set(SPARSE) == {
        "topk", "threshold", "dgc", "gaussiank", "redsync", "sidco", "gtopk", "topkdsa", "oktopk",
        "slots", "spardl", "adtopk", "demo_dct",
    }  # fmt: skip
    assert set(recipes.names()) - set(SHARING) == {"dense", "tuned"}


@pytest.mark.parametrize("rule", [["conv"], layout.small], ids=["patterns", "rule"])
@pytest.mark.parametrize("name", SHARING)
def test_what_shall_stay_dense_is_averaged_exactly(name: str, rule: Any) -> None:
    more = {"memory": "none"} if name == "dgc" else {}
    recipe = built(name, dense=rule, **more)
    states: list[dict[str, Any]] = [{} for _ in range(WORLD)]
    for step in range(3):
        outcomes = take_step(recipe, WORLD, states, step)
        exact = torch.stack([o.x[CONV] for o in outcomes]).double().mean(0)
        assert close(outcomes[0].mean[CONV], exact, exact)


@pytest.mark.parametrize("name", SHARING)
def test_a_dense_rule_keeps_the_law(name: str) -> None:
    train(built(name, dense=["conv"]), 3)


@pytest.mark.parametrize("name", SHARING)
def test_parameters_without_feedback_keep_nothing(name: str) -> None:
    recipe = built(name, no_feedback=["conv"], memory=Residual())  # of which nothing decays
    seen = train(recipe, 3, fed=slice(0, CONV.start))
    residual = seen[-1][0].residual
    assert residual is not None
    assert not residual[CONV].any() and residual[: CONV.start].any()
    with pytest.raises(ValueError, match="no_feedback says which parameters keep no residual"):
        built(name, no_feedback=["conv"], memory="none")


@pytest.mark.parametrize("name", SPARSE)
def test_partial_sparsification_tries_dense_and_keeps_the_law(name: str) -> None:
    """Every other step of the trials is dense: the mean is exact."""
    recipe = built(name, partial=True)
    plan = next(part for part in parts(recipe) if isinstance(part, Choose))
    assert [choice for choice, _ in plan.choices] == ["dense", "sparse"]
    seen = train(recipe, plan.longest + 2)
    if name != "dgc":  # whose momentum goes into what is sent
        exact = torch.stack([o.x for o in seen[1]]).double().mean(0)
        assert close(seen[1][0].mean, exact, exact)
    assert seen[0][0].entries < seen[1][0].entries == NUMEL


@pytest.mark.parametrize("name", SPARSE)
def test_the_cheapest_collective_serves_every_sparse_recipe(name: str) -> None:
    train(built(name, collective="cheapest"), 3)


@pytest.mark.parametrize("name", SPARSE)
def test_thresholds_are_estimated_where_top_k_is_exact(name: str) -> None:
    if name not in ESTIMATED:
        with pytest.raises(ValueError, match=r"estimate is for .*(topk\(estimate=True\)|flat)"):
            built(name, estimate=True)
        return
    recipe = built(name, estimate=7, **ESTIMATED[name])
    assert Drifting(interval=7, shortest=5) in parts(recipe)
    seen = train(recipe, 30)
    kept = [outcomes[0].entries for outcomes in seen[20:]]
    asked = train(built(name, **ESTIMATED[name]), 1)[0][0].entries
    assert asked / 3 <= sum(kept) / len(kept) <= 3 * asked


def test_partial_and_a_schedule_of_a_selectors_number_do_not_go_together() -> None:
    """Its trials would be forgotten in every step, and all would stay sparse."""
    with pytest.raises(ValueError, match="partial times the steps of one recipe, got a schedule"):
        recipes.gaussiank(capacity=lambda step: 2.0, partial=True)
    assert recipes.gaussiank(density=lambda step: 0.1, partial=True) is not None
