"""Every published algorithm as one expression, with its citation: the table of contents.

A recipe is a function that returns a reducer. Numbers may be schedules; defaults are the paper's,
without warm-up. `parse("adtopk(density=0.01)")` reads the same call from a string.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch

from thinwire.bucket import Bucket, View, by_dim0, by_dim1, by_layer, by_longer, by_row
from thinwire.collectives.gather import AllGather
from thinwire.combinators import Remember, Route, Rule, Warmup
from thinwire.combinators import dense as _dense
from thinwire.frames.lowrank import LowRank
from thinwire.frames.shared import Identity, SharedCoordinates
from thinwire.layout import Layout, Slot
from thinwire.memory import Residual
from thinwire.protocols import Collective, Memory, Reducer
from thinwire.reducers import Project, Select
from thinwire.schedule import Number
from thinwire.selectors.topk import topk as _topk
from thinwire.wire import Wire
from thinwire.wire import wire as _wire

ROWS: dict[str, View] = {"matrix": by_row, "dim1": by_dim1, "longer": by_longer, "dim0": by_dim0}


def dense() -> Reducer:
    """Plain averaging: what DDP does by itself."""
    return _dense()


def half(*, memory: str | Memory = "none") -> Reducer:
    """16 bits a value (IEEE half, scaled by a power of two), summed in single precision."""
    return _with(memory, 0, Project(frame=Identity(), wire=_wire("fp16")))


def bf16(*, memory: str | Memory = "none") -> Reducer:
    """16 bits a value (bfloat16), summed in single precision."""
    return _with(memory, 0, Project(frame=Identity(), wire=_wire("bf16")))


def randomk(
    density: Number = 0.01,
    *,
    memory: str | Memory = "residual",
    wire: str | Wire = "fp32",
    warmup: int = 0,
    seed: int = 0,
) -> Reducer:
    """Stich et al., NeurIPS 2018: random coordinates all ranks draw alike; no index travels."""
    frame = SharedCoordinates(density=density, seed=seed)
    return _with(memory, warmup, Project(frame=frame, wire=_wire(wire)))


def topk(
    density: Number = 0.01,
    *,
    collective: Collective | None = None,
    memory: str | Memory = "residual",
    wire: str | Wire = "fp32",
    warmup: int = 0,
) -> Reducer:
    """Aji & Heafield, EMNLP 2017: the largest entries of every layer, all-gathered (TopkA)."""
    select = Select(
        pick=_topk,
        over=by_layer,
        density=density,
        collective=_collective(collective),
        wire=_wire(wire),
    )
    return _with(memory, warmup, select)


def vectors(slot: Slot) -> bool:
    """ADTopk's rule for what stays dense: biases and norms, anything with one entry a row."""
    return len(slot.shape) <= 1 or slot.numel == slot.shape[0]


@dataclass(frozen=True)
class StaysDense:
    """The caller's rule, and whatever would be sent whole anyway: dense needs no indices for it."""

    rule: Rule
    over: View
    density: Number

    def __call__(self, slot: Slot) -> bool:
        return self.rule(slot) or (not callable(self.density) and self._whole(self.density, slot))

    def _whole(self, density: float, slot: Slot) -> bool:
        flat = torch.empty(slot.offset + slot.numel, device="meta")
        layout = Layout((slot,), flat.numel())
        pieces = self.over(Bucket(flat=flat, layout=layout, state={}), density)
        return all(piece.k == piece.rows.shape[1] for piece in pieces)


def adtopk(
    density: Number = 0.01,
    *,
    rows: str | View = "matrix",
    dense: Rule | None = vectors,
    collective: Collective | None = None,
    memory: str | Memory = "residual",
    wire: str | Wire = "fp32",
    warmup: int = 0,
) -> Reducer:
    """ADTopk, HPDC 2024: all-dimension top-k, some entries of every row.

    `rows` says what a row is: "matrix" (output channel x rest), "dim1" (as published code does),
    "longer", "dim0". Parameters for which `dense` holds are averaged whole; None compresses all.
    """
    over = ROWS.get(rows) if isinstance(rows, str) else rows
    if over is None or not callable(over):
        raise ValueError(f"rows must be one of {', '.join(ROWS)} (or a view), got {rows!r}")
    if not (dense is None or callable(dense)):
        raise ValueError(f"dense must be a rule (slot -> bool) or None, got {dense!r}")
    select = Select(
        pick=_topk,
        over=over,
        density=density,
        collective=_collective(collective),
        wire=_wire(wire),
    )
    rule = None if dense is None else StaysDense(dense, over, density)
    return _with(memory, warmup, select if rule is None else Route(rule, _dense(), select))


def powersgd(
    rank: int = 4,
    *,
    min_saving: float = 1.0,
    memory: str | Memory = "residual",
    wire: str | Wire = "fp32",
    warmup: int = 0,
    seed: int = 0,
) -> Reducer:
    """Vogels et al., NeurIPS 2019: low rank, both factors averaged every step."""
    frame = LowRank(rank=rank, rounds=2, min_saving=min_saving, seed=seed)
    return _with(memory, warmup, Project(frame=frame, wire=_wire(wire)))


def acpsgd(
    rank: int = 4,
    *,
    min_saving: float = 1.0,
    memory: str | Memory = "residual",
    wire: str | Wire = "fp32",
    warmup: int = 0,
    seed: int = 0,
) -> Reducer:
    """Zhang et al., ICDCS 2023: low rank, the factors averaged in turn, one all-reduce a bucket."""
    frame = LowRank(rank=rank, rounds=1, min_saving=min_saving, seed=seed)
    return _with(memory, warmup, Project(frame=frame, wire=_wire(wire)))


def names() -> list[str]:
    """All recipes."""
    found = vars(sys.modules[__name__]).items()
    return [n for n, f in found if inspect.isfunction(f) and _is_recipe(n, f)]


def parse(call: str) -> Reducer:
    """A recipe written as a call with literal arguments, e.g. "topk(density=0.01)"."""
    try:
        tree = ast.parse(call.strip(), mode="eval").body
    except SyntaxError:
        raise ValueError(
            f"a recipe is written as a call, topk(density=0.01), got {call!r}"
        ) from None
    node = tree if isinstance(tree, ast.Call) else ast.Call(func=tree, args=[], keywords=[])
    name = node.func.id if isinstance(node.func, ast.Name) else ast.unparse(node.func)
    if name not in names():
        raise UnknownRecipe(name)
    try:
        args = [ast.literal_eval(arg) for arg in node.args]
        keywords = {str(k.arg): ast.literal_eval(k.value) for k in node.keywords}
    except ValueError:
        raise ValueError(f"arguments of a recipe must be literals, got {call!r}") from None
    recipe: Callable[..., Reducer] = getattr(sys.modules[__name__], name)
    try:
        inspect.signature(recipe).bind(*args, **keywords)
    except TypeError as error:
        signature = f"{name}{inspect.signature(recipe)}"
        raise ValueError(f"{call!r}: {error}; the recipe is {signature}") from None
    return recipe(*args, **keywords)


class UnknownRecipe(ValueError, AttributeError):
    """No recipe of that name; the message lists those there are."""

    def __init__(self, name: str) -> None:
        super().__init__(f"unknown recipe {name!r}; known are {', '.join(names())}")


def __getattr__(name: str) -> Callable[..., Reducer]:
    raise UnknownRecipe(name)


def _is_recipe(name: str, function: Callable[..., object]) -> bool:
    here = function.__module__ == __name__ and not name.startswith("_")
    return here and inspect.signature(function).return_annotation == "Reducer" and name != "parse"


def _collective(collective: Collective | None) -> Collective:
    if collective is not None and not callable(getattr(collective, "sum", None)):
        raise ValueError(f"collective must have sum(...), e.g. AllGather(), got {collective!r}")
    return collective or AllGather()


def _with(memory: str | Memory, warmup: int, inner: Reducer) -> Reducer:
    """Memory outside, warm-up inside it: a dense step delivers the residual at once."""
    inner = inner if warmup == 0 else Warmup(warmup, inner)
    if memory == "none":
        return inner
    if memory == "residual":
        return Remember(inner, Residual())
    if not (hasattr(memory, "fold") and hasattr(memory, "keep")):
        raise ValueError(f"memory must be 'none' or 'residual' (or a Memory), got {memory!r}")
    assert not isinstance(memory, str)
    return Remember(inner, memory)
