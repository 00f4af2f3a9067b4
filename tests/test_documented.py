"""Every public name says what it does, what its arguments are, and gives an example that runs."""

from __future__ import annotations

import doctest
import inspect
from importlib import import_module
from typing import Any

import pytest

import thinwire
from thinwire import Bucket, Session, collectives, recipes
from thinwire.comm import local
from thinwire.recipes.recipe import read_docs

PUBLIC: dict[str, Any] = {
    **{name: getattr(thinwire, name) for name in thinwire.__all__ if name != "recipes"},
    **{name: getattr(collectives, name) for name in collectives.__all__},
    **{f"Session.{name}": method for name, method in vars(Session).items()
       if name[0] != "_" and inspect.isfunction(method)},
    "recipes.parse": recipes.parse, "recipes.names": recipes.names,
    "local.run": local.run, "Bucket.of": Bucket.of,
}  # fmt: skip
MODULES = sorted({inspect.getmodule(thing).__name__ for thing in PUBLIC.values()})


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_are_documented(name: str) -> None:
    thing = PUBLIC[name]
    text = inspect.getdoc(thing) or ""
    assert text.split("\n")[0].strip().endswith((".", ":")) or "\n" in text, "what it does"
    error = inspect.isclass(thing) and issubclass(thing, Exception)
    made_by_us = thing in (Session, Bucket)  # nobody calls the constructor
    named = [] if error or made_by_us else list(inspect.signature(thing).parameters)
    named = [one for one in named if one != "self"]
    if named:
        section = text.split("Args:")[1]
        missing = [one for one in named if f"{one}: " not in section]
        assert not missing, f"{name} does not say what {missing} are"
    assert ">>>" in text or "    with thinwire" in text or thing is Bucket, f"{name} has no example"


@pytest.mark.parametrize("name", recipes.names())
def test_recipes_have_an_example_that_parses(name: str) -> None:
    docs = read_docs(getattr(recipes, name))
    assert docs.summary and docs.source
    assert repr(recipes.parse(docs.example))


@pytest.mark.parametrize("module", MODULES)
def test_examples_run(module: str) -> None:
    home = import_module(module)
    failed, _ = doctest.testmod(home, extraglobs={"torch": import_module("torch")})
    assert not failed
