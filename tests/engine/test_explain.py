"""What a session says of its recipe: the choice, the evidence, and where evidence ends."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from thinwire import evidence, recipes
from thinwire.engine.explain import explain
from thinwire.evidence import Trial

WEIGHT = torch.nn.Parameter(torch.zeros(2))
SGD = torch.optim.SGD([WEIGHT], lr=0.1, momentum=0.9)
ADAM = torch.optim.AdamW([WEIGHT])


def trial(recipe: str, saving: float, cost: float, **more: Any) -> Trial:
    known: dict[str, Any] = {"job": "resnet20", "optimizer": "sgd", "clipped": False, "workers": 4}
    known |= {"steps": 936, "seeds": 3}
    return Trial(recipe=recipe, saving=saving, cost=cost, **(known | more))


TRIALS = (
    trial("tuned(saving=16, steps=936)", 15.9, 0.2),
    trial("tuned(saving=28, steps=936)", 27.8, 1.1),
    trial("tuned(saving=16, steps=776, clipped=True)", 16.2, -0.3, job="lstm-lm", clipped=True),
)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence, "trials", lambda: TRIALS)


def explained(saving: float, optimizer: torch.optim.Optimizer = SGD, **more: Any) -> str:
    asked = recipes.tuned(saving=saving, steps=500, **more)
    return explain(asked, asked.choose(4, momentum=0.9), optimizer)  # type: ignore[attr-defined]


def test_a_tuned_recipe_says_what_it_is_and_what_it_cost(recorded: None) -> None:
    text = explained(16)
    assert text.startswith("tuned(saving=16, steps=500)\n  is ")
    assert "resnet20, sgd, 936 steps, 3 seeds: 0.2 points worse than dense, 15.9 times" in text
    assert "27.8" not in text and "lstm" not in text


def test_between_two_savings_the_larger_one_speaks(recorded: None) -> None:
    assert "27.8 times" in explained(20) and "15.9" not in explained(20)


def test_beyond_the_evidence_it_says_so(recorded: None) -> None:
    assert "beyond the evidence" in explained(60) and "the most is 28" in explained(60)
    assert "beyond the evidence" in explained(12, ADAM) and "the most" not in explained(12, ADAM)
    clipped = explained(16, clipped=True)
    assert "0.3 % perplexity better" in clipped and "points" not in clipped


def test_any_recipe_has_its_evidence_or_none() -> None:
    assert "gpt2, adamw" in explain(recipes.int8(), recipes.int8(), ADAM)
    assert "gpt2, adamw" in explain(recipes.tuned(), recipes.tuned(), ADAM)
    assert "resnet20, sgd" in explain(recipes.qsgd(), recipes.qsgd(), SGD)
    foreign = recipes.topk(density=0.123)
    assert "no recorded training of this recipe" in explain(foreign, foreign, SGD)
