"""What every recipe sends for a model of a given size, with where it comes from."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from thinwire import recipes
from thinwire.comm.metered import all_reduced
from thinwire.describe import spell
from thinwire.layout import Layout
from thinwire.protocols import Reducer
from thinwire.recipes.recipe import Option, list_options, read_docs

SIDE = 1024  # the model: square matrices of this side with their biases, and a smaller rest


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One recipe: what it is, who published it, how to write it, what it is made of.

    `bytes` is what a rank sends per step; at least that, if it is a `floor`.
    """

    name: str
    summary: str
    text: str
    source: str
    example: str
    options: tuple[Option, ...]
    composition: str
    bytes: float
    bytes_dense: int
    floor: bool


def catalogue(params: int, world: int, density: float, rank: int) -> list[Entry]:
    """Every recipe, with this density or rank where it takes one."""
    layers, rest = divmod(params, SIDE * SIDE + SIDE)
    shapes = [(layers, model(SIDE, SIDE, SIDE)), (1, model(rest // SIDE, SIDE, rest % SIDE))]
    entries = []
    for name in recipes.names():
        recipe: Callable[..., Reducer] = getattr(recipes, name)
        known = inspect.signature(recipe).parameters
        given = {"density": density, "rank": rank}
        reducer = recipe(**{key: value for key, value in given.items() if key in known})
        says = read_docs(recipe)
        # two steps, because some recipes alternate; not the first, which may look around
        priced = [(n, reducer.traffic(layout, world, s)) for n, layout in shapes for s in (1, 2)]
        entries.append(
            Entry(
                name=name,
                summary=says.summary,
                text=says.text,
                source=says.source,
                example=says.example,
                options=tuple(list_options(recipe)),
                composition=spell(replace(cast(Any, reducer))),
                bytes=sum(count * one.bytes / 2 for count, one in priced),
                bytes_dense=all_reduced(4 * params, world),
                floor=any(one.floor for _, one in priced),
            )
        )
    return entries


def model(rows: int, columns: int, bias: int) -> Layout:
    """One linear layer."""
    shapes = {"weight": (rows, columns), "bias": (bias,)}
    return Layout.of({name: torch.empty(shape, device="meta") for name, shape in shapes.items()})
