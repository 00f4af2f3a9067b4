"""Every published algorithm as one expression, with its citation: the table of contents.

A recipe is a function that returns a reducer. Numbers may be schedules; defaults are the paper's,
without warm-up. `parse("adtopk(density=0.01)")` reads the same call from a string, in which a
number may be written as a schedule: "topk(density=Ramp(start=0.25, end=0.01, steps=500))", also one
of several by parameter: "topk(density={small: 1.0, 'embed': 0.001, '': 0.01})", and a memory or a
collective with its options: "topk(memory=Residual(learning_rate=True))". It is what `repr` of a
recipe shows.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable
from typing import Any

from thinwire import collectives, layout, memory, schedule
from thinwire.protocols import Reducer
from thinwire.recipes.alldimension import adtopk
from thinwire.recipes.auto import auto
from thinwire.recipes.lowrank import acpsgd, powersgd, randomk
from thinwire.recipes.merging import gtopk, oktopk, slots, spardl, topkdsa
from thinwire.recipes.recipe import suggest_options
from thinwire.recipes.sparse import demo_dct, dgc, gaussiank, redsync, sidco, threshold, topk
from thinwire.recipes.tuned import tuned
from thinwire.recipes.values import (
    bf16,
    dense,
    fp8,
    half,
    int4,
    int8,
    natural,
    onebit,
    qsgd,
    signsgd,
    terngrad,
)
from thinwire.spelling import meant

__all__ = [  # noqa: RUF022  (the order in which people read them)
    "dense", "half", "bf16", "fp8", "int8", "int4", "onebit", "natural", "signsgd", "qsgd",
    "terngrad", "randomk", "topk", "threshold", "dgc", "gaussiank", "redsync", "sidco", "gtopk",
    "topkdsa", "oktopk", "slots", "spardl", "adtopk", "powersgd", "acpsgd", "demo_dct", "tuned",
    "auto",
]  # fmt: skip

SCHEDULES = ("Flushed", "Piecewise", "Ramp", "dgc_ramp", "stages")
MEMORIES = ("MomentumCorrected", "Residual")
RULES = ("small", "vectors")
COLLECTIVES = tuple(collectives.__all__)
HOMES = {**dict.fromkeys(SCHEDULES, schedule), **dict.fromkeys(MEMORIES, memory),
         **dict.fromkeys(COLLECTIVES, collectives)}  # fmt: skip


def names() -> list[str]:
    """All recipes, in the order in which people read them.

    Example:
        >>> names()[:4]
        ['dense', 'half', 'bf16', 'fp8']
    """
    return list(__all__)


def parse(call: str) -> Reducer:
    """A recipe written as a call with literal arguments.

    Args:
        call: The call; arguments may be schedules, memories, collectives and rules too.

    Example:
        >>> parse("topk(density=Ramp(start=0.3, end=0.01, steps=500))")
        topk(density=Ramp(start=0.3, end=0.01, steps=500))
    """
    try:
        tree = ast.parse(call.strip(), mode="eval").body
    except (SyntaxError, MemoryError, RecursionError, ValueError):
        raise ValueError(
            f"a recipe is written as a call, topk(density=0.01), got {call!r}"
        ) from None
    node = tree if isinstance(tree, ast.Call) else ast.Call(func=tree, args=[], keywords=[])
    name = node.func.id if isinstance(node.func, ast.Name) else ast.unparse(node.func)
    if name not in names():
        raise UnknownRecipe(name)
    reducer: Reducer = _called(getattr(sys.modules[__name__], name), node, call, call)
    return reducer


class UnknownRecipe(ValueError, AttributeError):
    """No recipe of that name; the message lists those there are."""

    def __init__(self, name: str) -> None:
        known = ", ".join(names())
        super().__init__(f"unknown recipe {name!r}; known are {known}{meant(name, names())}")


def __getattr__(name: str) -> Callable[..., Reducer]:
    raise UnknownRecipe(name)


def _argument(node: ast.expr, call: str) -> Any:
    """A literal, a rule, or a schedule, a memory or a collective with such arguments."""
    named = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id
    if isinstance(node, ast.Call) and named in HOMES:
        part = getattr(HOMES[str(named)], str(named))
        return _called(part, node, call, ast.unparse(node))
    if isinstance(node, ast.Name) and node.id in RULES:
        return getattr(layout, node.id)
    plain = ast.Constant | ast.Name
    if isinstance(node, ast.Dict) and all(isinstance(key, plain) for key in node.keys):
        pairs = zip(node.keys, node.values, strict=True)  # densities by parameter
        return {_argument(key, call): _argument(value, call) for key, value in pairs if key}
    return _literal(node, call)


def _literal(node: ast.expr, call: str) -> Any:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, MemoryError, RecursionError):
        raise ValueError(
            f"arguments of a recipe must be literals, schedules ({', '.join(SCHEDULES)}), "
            f"memories ({', '.join(MEMORIES)}), collectives ({', '.join(COLLECTIVES)}) or rules "
            f"({', '.join(RULES)}), got {call!r}"
        ) from None


def _called(function: Callable[..., Any], node: ast.Call, recipe: str, call: str) -> Any:
    """What the function makes of the arguments of this call inside a recipe."""
    args = [_argument(arg, recipe) for arg in node.args]
    keywords = {str(k.arg): _argument(k.value, recipe) for k in node.keywords}
    try:
        inspect.signature(function).bind(*args, **keywords)
    except TypeError as error:
        raise ValueError(
            f"in the recipe {call!r}: {error}; {suggest_options(function, keywords)}"
        ) from None
    try:
        return function(*args, **keywords)
    except TypeError as error:  # a string where a number should be, and the like
        raise ValueError(f"in the recipe {call!r}: {error}") from None
