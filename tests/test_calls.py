"""A recipe prints as the call that makes it, and says what its options mean."""

from __future__ import annotations

import copy
import inspect
import json
import pickle
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from thinwire import MomentumCorrected, Ramp, Residual, recipes, small, vectors
from thinwire.bucket import by_row
from thinwire.collectives import AllGather
from thinwire.combinators import Alternate, Remember, Route, Warmup, dense
from thinwire.describe import describe, spell
from thinwire.protocols import Reducer
from thinwire.recipes.options import USUAL, Shared, Sparse, Wired
from thinwire.recipes.recipe import Documented, list_options, read_docs
from thinwire.reducers import Select
from thinwire.selectors.topk import topk

ROOT = Path(__file__).parents[1]
SHOWN = [
    ('topk(density=0.01, wire="int8+auto")', recipes.topk(density=0.01, wire="int8+auto")),
    ("topk(density=0.01)", recipes.topk()),
    ("dense()", recipes.dense()),
    ("half()", recipes.half()),
    ('half(memory="residual")', recipes.half(memory="residual")),
    ("dgc(density=0.001)", recipes.dgc(memory="momentum")),
    ("powersgd(rank=4)", recipes.powersgd()),
    ("qsgd(bits=8)", recipes.qsgd(8)),
    (
        'adtopk(density=0.02, rows="dim1", dense=["^0[.]"], no_feedback=["^14[.]"])',
        recipes.adtopk(0.02, rows="dim1", dense=["^0[.]"], no_feedback=["^14[.]"]),
    ),
    (
        "adtopk(density=0.01, interleave=(2, 1), dense=None, partial=True)",
        recipes.adtopk(interleave=(2, 1), dense=None, partial=True),
    ),
    (
        "gtopk(density=Ramp(start=0.25, end=0.01, steps=9), tree=True)",
        recipes.gtopk(Ramp(start=0.25, end=0.01, steps=9), tree=True),
    ),
    (
        r'topk(density={small: 1.0, "a\\.": 0.5, "": 0.01})',
        recipes.topk({small: 1.0, r"a\.": 0.5, "": 0.01}),
    ),
    (
        "onebit(memory=MomentumCorrected(learning_rate=True), dense=vectors)",
        recipes.onebit(memory=MomentumCorrected(learning_rate=True), dense=vectors),
    ),
    ("qsgd(bits=Piecewise((10,), (8, 4)))", recipes.parse("qsgd(Piecewise((10,), (8, 4)))")),
    (
        "topk(density=0.01, collective=AllGather(ragged=True))",
        recipes.topk(collective=AllGather(ragged=True)),
    ),
    ('auto(density=0.01, among=("dense", "topk"))', recipes.auto(among=("dense", "topk"))),
]


@pytest.mark.parametrize(("call", "recipe"), SHOWN)
def test_a_recipe_prints_as_a_call_that_makes_it_again(call: str, recipe: Reducer) -> None:
    assert repr(recipe) == call
    again = recipes.parse(call)
    assert describe(again) == describe(recipe) and again == recipe
    assert repr(again) == call


def says(name: str) -> Documented:
    return read_docs(getattr(recipes, name))


@pytest.mark.parametrize("name", recipes.names())
def test_every_recipe_and_its_example_print_what_parse_reads(name: str) -> None:
    for recipe in (getattr(recipes, name)(), recipes.parse(says(name).example)):
        assert repr(recipe).startswith(f"{name}(")
        assert describe(recipes.parse(repr(recipe))) == describe(recipe)


def calls(found: Any) -> Iterator[str]:
    if isinstance(found, list):
        for part in found:
            yield from calls(part)
    elif isinstance(found, dict):
        yield from (v for k, v in found.items() if k == "recipe" and isinstance(v, str))
        yield from calls(list(found.values()))


def test_recorded_calls_are_read_and_print_themselves() -> None:
    lines = [
        line
        for page in (ROOT / "docs" / "results").glob("*.jsonl")
        for line in page.read_text().splitlines()
    ]
    recorded = set(calls([json.loads(line) for line in lines])) - {"ddp", "fp16-hook"}
    assert len(recorded) > 50 and any("no_feedback" in call for call in recorded)
    for call in recorded:
        recipe = recipes.parse(call)
        assert describe(recipes.parse(repr(recipe))) == describe(recipe), call


def test_the_call_is_no_part_of_a_recipe() -> None:
    """Ranks compare what a recipe is, however it was written; a changed copy is no such call."""
    one, other = recipes.topk(), recipes.topk(0.01, wire="fp32", refresh=1)
    assert one == other and describe(one) == describe(other) and hash(one) == hash(other)
    assert isinstance(one, Remember)
    for copied in (copy.copy(one), copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
        assert repr(copied) == "topk(density=0.01)"
    changed = replace(one, memory=Residual(decay=0.9))
    assert repr(changed) == "Remember(Select(pick=topk), memory=Residual(decay=0.9))"


def test_what_is_composed_by_hand_prints_as_constructors() -> None:
    select = Select(pick=topk, over=by_row, density=0.1, collective=AllGather(ragged=True))
    shown = "Select(pick=topk, over=by_row, density=0.1, collective=AllGather(ragged=True))"
    assert repr(select) == shown
    assert repr(Remember(Warmup(9, select))) == f"Remember(Warmup(9, {shown}))"
    both = Route(vectors, dense(), Alternate(select, recipes.topk(0.5)))
    assert repr(both) == (
        f"Route(vectors, Project(frame=Identity()), Alternate({shown}, topk(density=0.5)))"
    )


def test_what_cannot_be_typed_prints_without_an_address() -> None:
    class Foreign:
        def __call__(self, slot: Any) -> bool:
            return False

    things = [Foreign(), lambda slot: True, partial(pow, 0.5), Foreign().__call__, {"b", "a"}, len]
    assert not any("0x" in spell(thing) for thing in things)
    assert repr(recipes.topk(dense=Foreign())) == "topk(density=0.01, dense=Foreign(...))"
    assert [spell(x) for x in ('a"b', "it's", {"b", "a"}, (1,), True, 0.1, None)] == [
        "'a\"b'", '"it\'s"', '{"a", "b"}', "(1,)", "True", "0.1", "None",
    ]  # fmt: skip


@pytest.mark.parametrize("name", recipes.names())
def test_every_recipe_says_what_it_is_and_what_its_options_mean(name: str) -> None:
    listed = list_options(getattr(recipes, name))
    assert says(name).source and says(name).example.startswith(f"{name}(")
    assert len(says(name).summary) <= 56, "one line of `thinwire list`"
    known = inspect.signature(getattr(recipes, name)).parameters
    assert [option.name for option in listed] == list(known)
    assert [option.default for option in listed] == [p.default for p in known.values()]
    assert all(o.meaning.endswith(".") and "**shared" not in o.meaning for o in listed)
    assert not any("|" in option.type for option in listed)


def test_shared_options_are_written_down_once() -> None:
    assert set(USUAL) == set(Sparse.__annotations__)
    assert set(Shared.__annotations__) < set(Wired.__annotations__) < set(Sparse.__annotations__)
    first, second = ({o.name: o for o in list_options(r)} for r in (recipes.topk, recipes.adtopk))
    assert first["collective"] == second["collective"] and first["collective"].shared
    assert (first["dense"].default, second["dense"].default) == (None, vectors)
    assert first["dense"].meaning == second["dense"].meaning and not first["refresh"].shared


@pytest.mark.parametrize(("call", "message"), [
    (lambda: recipes.topk(densty=0.1),  # type: ignore[call-arg]
     "unexpected keyword argument 'densty'; topk takes density, refresh, .*; did you mean density"),
    (lambda: recipes.adtopk(hybrid=True),  # type: ignore[call-arg]
     "unexpected keyword argument 'hybrid'; adtopk takes density, rows"),
    (lambda: recipes.dense(wire="bf16"),  # type: ignore[call-arg]
     "unexpected keyword argument 'wire'; dense takes no options"),
    (lambda: recipes.topk(0.1, 0.2),  # type: ignore[call-arg]
     "too many positional arguments; topk takes density"),
])  # fmt: skip
def test_unknown_options_are_refused_with_what_there_is(call: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        call()


def test_unknown_options_of_a_written_call_too() -> None:
    with pytest.raises(ValueError, match=r"'topk\(colective=1\)'.* did you mean collective\?$"):
        recipes.parse("topk(colective=1)")
    with pytest.raises(ValueError, match=r"Ramp takes start, end, steps; did you mean start\?$"):
        recipes.parse("topk(Ramp(strt=1, end=2, steps=3))")
