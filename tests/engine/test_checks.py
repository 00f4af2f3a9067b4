"""What a recipe says of parameters must be true of those it meets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from tests.engine.alone import alone  # noqa: F401
from thinwire import recipes
from thinwire.engine.checks import check_patterns
from thinwire.layout import vectors
from thinwire.schedule import Piecewise

pytestmark = pytest.mark.usefixtures("alone")
NAMES = {
    f"layers.{i}.{kind}": torch.empty(4, 4) if kind == "weight" else torch.empty(4)
    for i in range(3)
    for kind in ("weight", "bias")
}
MOVING = Piecewise((3,), (0.25, 0.75))
MOVING_BITS = Piecewise((3,), (8, 4))


def model() -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net[0].requires_grad_(False)
    return net


@pytest.mark.parametrize("recipe", [
    recipes.adtopk(dense=["bias", "emb"]),
    recipes.topk(dense=["emb"], partial=True),
    recipes.gtopk(no_feedback=["emb"]),
    recipes.qsgd(bits=MOVING_BITS, dense=["emb"]),
    recipes.powersgd(dense=["emb"]),
    recipes.adtopk(no_feedback=["emb"]),
    recipes.adtopk(dense=["emb"], partial=True),
    recipes.adtopk(no_feedback=["emb"], interleave=True, steps=10, fraction=MOVING),
    recipes.adtopk({"emb": 0.1, "": 0.01}, dense=None),
    recipes.topk({"emb": 0.1, "": 0.01}),
    recipes.topk({"bias": 1.0, "emb": 0.1, "": 0.01}, warmup=3),
    recipes.topk({"emb": MOVING, "": 0.01}, memory="none", collective="two_level(2)"),
    recipes.randomk({"emb": 0.1, "": 0.01}),
    recipes.demo_dct({"emb": 0.1, "": 0.01}),
])  # fmt: skip
def test_a_pattern_that_is_found_in_no_name_is_refused(recipe: Any) -> None:
    with pytest.raises(ValueError, match=r"pattern 'emb' is found in no parameter's name") as said:
        check_patterns(recipe, NAMES)
    assert "there are layers.0.weight, layers.0.bias, " in str(said.value)
    assert "layers.2.weight and 1 more" in str(said.value)
    check_patterns(recipe, {**NAMES, "embed.weight": torch.empty(8, 4)})


def test_rules_and_the_pattern_of_whatever_else_may_hold_for_none() -> None:
    density = {vectors: 1.0, "layers": 0.1, "": 0.01}
    for recipe in (recipes.topk(density), recipes.dgc(), recipes.adtopk(), recipes.auto()):
        check_patterns(recipe, {"layers.weight": torch.empty(4, 4)})


def test_a_rule_behind_one_that_takes_all_its_parameters_is_refused() -> None:
    for density, late in (
        ({"layers": 0.01, "bias": 1.0, "": 0.1}, "bias"),
        ({"layers": 0.1, vectors: 1.0, "": 0.01}, "vectors"),
    ):
        with pytest.raises(ValueError, match=rf"recipe's .*{late}.* is reached by no parameter"):
            check_patterns(recipes.topk(density), NAMES)


def test_attach_and_distribute_look_for_patterns_in_all_names() -> None:
    """Of what is frozen, or another optimizer's, too: one recipe may serve several."""
    for known, pattern in ((True, r"^0.weight"), (True, r"^1"), (False, r"module"), (False, "2")):
        net = model()
        recipe = recipes.topk({pattern: 0.1, "": 0.01})
        optimizer = torch.optim.SGD(net[1].parameters(), lr=0.1)
        for plug in (
            lambda net=net, recipe=recipe, optimizer=optimizer: thinwire.distribute(
                optimizer, net.named_parameters(), recipe
            ),
            lambda net=net, recipe=recipe: thinwire.attach(DistributedDataParallel(net), recipe),
        ):
            if known:
                plug().detach()
            else:
                with pytest.raises(ValueError, match="is found in no parameter's name"):
                    plug()


def test_buckets_and_their_size_are_not_both_given() -> None:
    net = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"buckets says what goes together, got bucket_mb=1"):
        thinwire.distribute(
            optimizer, net.named_parameters(), recipes.topk(), buckets=[2], bucket_mb=1
        )
