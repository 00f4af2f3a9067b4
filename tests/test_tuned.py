"""`tuned`: what it chooses, for which saving and optimizer, and that its budget is met on paper."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from thinwire import Bucket, recipes
from thinwire.comm import local
from thinwire.describe import describe
from thinwire.layout import Layout
from thinwire.protocols import Comm
from thinwire.recipes.tuned import Tuned


def sparse(saving: float = 16, steps: int = 1000, **options: Any) -> Tuned:
    found = recipes.tuned(saving=saving, steps=steps, **options)
    assert isinstance(found, Tuned)
    return found


@pytest.mark.parametrize(
    ("saving", "code"),
    [(1.5, "bf16"), (2, "bf16"), (3, "int8"), (4, "int8"), (5, "int4"), (8, "int4")],
)
def test_small_savings_are_codes_and_need_no_length(saving: float, code: str) -> None:
    assert describe(recipes.tuned(saving=saving)) == describe(getattr(recipes, code)())


def test_what_is_chosen_hangs_on_the_optimizer() -> None:
    with_momentum = describe(sparse().choose(4, momentum=0.9))
    assert "GTopK" in with_momentum and "MomentumCorrected(momentum=0.9" in with_momentum
    assert "Flushed" in with_momentum and "learning_rate=True" in with_momentum
    plain, adam = describe(sparse().choose(4)), describe(sparse().choose(4, adam=True))
    assert "Slots" in plain and "Momentum" not in plain and "steps=750" in plain
    assert "Slots" in adam and "steps=900" in adam


@pytest.mark.parametrize("saving", [9, 12, 16, 28, 60, 150, 400])
@pytest.mark.parametrize("world", [2, 4, 16, 64])
@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_the_schedule_costs_what_was_asked_for(saving: float, world: int, momentum: float) -> None:
    """By the recipes' own prices, which are of random indices: real ones take 4 % less."""
    steps, layout = 400, Layout.of({"w": torch.empty(1 << 20, device="meta")})
    recipe = sparse(saving, steps).choose(world, momentum=momentum)
    every = 2
    sampled = [recipe.traffic(layout, world, s).bytes for s in range(0, steps - 1, every)]
    sent = sum(sampled) * every + recipe.traffic(layout, world, steps - 1).bytes
    dense = recipes.dense().traffic(layout, world).bytes * steps
    assert math.isclose(dense / sent, 0.96 * saving, rel_tol=0.03)


def test_a_short_training_is_not_flushed_for_most_of_its_budget() -> None:
    assert "Flushed" not in describe(sparse(saving=100, steps=50).choose(4, momentum=0.9))


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_alone_it_keeps_the_law(world: int) -> None:
    """Where nobody completes it, it is what an optimizer without momentum would get."""
    recipe = sparse(steps=10)

    def worker(comm: Comm) -> Any:
        torch.manual_seed(comm.rank)
        bucket = Bucket.of({"w": torch.randn(40, 50)}, state={}, step=3)
        reduced = recipe.reduce(bucket, comm)
        return reduced.mean, reduced.sent.add_into(torch.zeros(2000), alpha=1.0)

    results = local.run(world, worker)
    average = torch.stack([sent for _, sent in results]).double().mean(dim=0)
    for mean, _ in results:
        assert torch.equal(mean, results[0][0])
        assert torch.allclose(mean.double(), average, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"saving": 0.5}, "saving says how many times fewer bytes, from 1 to 1000, got 0.5"),
        ({"saving": "much"}, "saving says how many times fewer bytes"),
        ({"saving": True}, "saving says how many times fewer bytes"),
        ({"saving": float("nan")}, "saving says how many times fewer bytes"),
        ({"saving": 16}, r"steps must be .* got None; e.g. tuned\(saving=16, steps=10_000\)"),
        ({"saving": 16, "steps": 0}, "steps must be how many optimizer steps"),
        ({"saving": 16, "steps": 1.5}, "steps must be how many optimizer steps"),
        ({"saving": 4, "steps": True}, "steps must be how many optimizer steps"),
        ({"saving": 16, "steps": 9, "clipped": "no"}, "clipped must be True or False, got 'no'"),
    ],
)
def test_slips_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        recipes.tuned(**options)
