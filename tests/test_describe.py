"""Descriptions: equal for equal recipes, different for different ones, never an address."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial

from thinwire import recipes
from thinwire.describe import describe
from thinwire.schedule import Ramp


def rule_maker(prefix):
    return lambda slot: slot.name.startswith(prefix)


def test_every_recipe_describes_itself():
    own = [name for name in recipes.names() if name != "tuned"]  # by itself it is int8
    texts = [describe(getattr(recipes, name)()) for name in own]
    assert len(set(texts)) == len(texts)
    assert not any("0x" in text for text in texts)
    assert texts == [describe(getattr(recipes, name)()) for name in own]


def test_any_difference_shows():
    variants = [
        recipes.adtopk(),
        recipes.adtopk(density=0.02),
        recipes.adtopk(density=lambda step: 0.02),
        recipes.adtopk(density=lambda step: 0.03),
        recipes.adtopk(density=Ramp(start=0.2, end=0.01, steps=9)),
        recipes.adtopk(density=partial(pow, 0.5)),
        recipes.adtopk(dense=rule_maker("head")),
        recipes.adtopk(dense=rule_maker("tail")),
        recipes.adtopk(wire="bf16"),
    ]
    assert len({describe(v) for v in variants}) == len(variants)
    assert describe(recipes.adtopk(dense=rule_maker("a"))) == describe(
        recipes.adtopk(dense=rule_maker("a"))
    )


def test_foreign_and_circular_things_have_an_end():
    def again(slot):
        return again(slot)

    class Foreign:
        pass

    assert "0x" not in describe([again, Foreign(), {"b": 1, 3: None}])


def test_sets_describe_alike_in_every_process():
    """String hashes differ from process to process, and so does the order of a set."""
    code = (
        "from thinwire.describe import describe; from thinwire import recipes; "
        "print(describe(recipes.adtopk(dense=eval(\"lambda s: s.name in {'a', 'bb', 'ccc'}\"))))"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("0", "1", "2")
    }
    assert len(said) == 1
    assert "StaysDense" in said.pop()


def test_repr_is_the_configuration():
    text = repr(recipes.adtopk(density=0.02))
    assert "density=0.02" in text
    assert "0x" not in text
