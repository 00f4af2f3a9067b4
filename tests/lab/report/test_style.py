"""Families of recipes: each recipe has one, its colour is its own, and eyes of all kinds see it."""

from __future__ import annotations

import itertools

import pytest

from thinwire import recipes
from thinwire_lab.report import style
from thinwire_lab.runs.config import BASELINES

# What no cones for red, for green, for blue leave of a colour (Machado et al. 2009).
EYES = {
    "all": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "red": ((0.152, 1.053, -0.205), (0.115, 0.786, 0.099), (-0.004, -0.048, 1.052)),
    "green": ((0.367, 0.861, -0.228), (0.280, 0.673, 0.047), (-0.012, 0.043, 0.969)),
    "blue": ((1.256, -0.077, -0.179), (-0.078, 0.931, 0.148), (0.005, 0.691, 0.304)),
}


def test_every_recipe_has_a_family():
    for name in (*recipes.names(), *BASELINES):
        assert style.family(name) is not style.OTHER, f"{name} has no family in style.py"
    assert style.family("mine.py:recipe()") is style.OTHER


def test_a_family_looks_alike_wherever_it_is_drawn():
    one = style.looks(["gtopk(density=0.1)", "dense()", "gtopk(density=0.01)"])
    other = style.looks(["int8()", "gtopk(density=0.01)"])
    first, second = one["gtopk(density=0.1)"], one["gtopk(density=0.01)"]
    assert first["color"] == second["color"] == other["gtopk(density=0.01)"]["color"]
    assert first["linestyle"] != second["linestyle"]
    assert style.family("ddp") is style.family("dense()")
    assert style.family("fp16-hook") is style.family("half()")


@pytest.mark.parametrize("eyes", EYES)
@pytest.mark.parametrize("dark", [False, True])
def test_families_are_told_apart_by_all_eyes(eyes, dark):
    """By colour, and by mark where there is one."""
    colours = [style.DARK[f.colour] if dark else f.colour for f in style.FAMILIES]
    seen = [lab(colour, EYES[eyes]) for colour in colours]
    near = [sum((a - b) ** 2 for a, b in zip(*pair, strict=True)) ** 0.5
            for pair in itertools.combinations(seen, 2)]  # fmt: skip
    assert min(near) > 15 and len({f.mark for f in style.FAMILIES}) == len(style.FAMILIES)


@pytest.mark.parametrize("dark", [False, True])
def test_colours_stand_out_from_the_paper(dark):
    paper = luminance(style.DARK[style.PAPER] if dark else style.PAPER)
    for family in (*style.FAMILIES, style.OTHER):
        own = luminance(style.DARK[family.colour] if dark else family.colour)
        assert (max(own, paper) + 0.05) / (min(own, paper) + 0.05) > 2


def linear(colour: str) -> list[float]:
    parts = [value / 255 for value in bytes.fromhex(colour[1:])]
    return [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]


def luminance(colour: str) -> float:
    return sum(w * p for w, p in zip((0.2126, 0.7152, 0.0722), linear(colour), strict=True))


def times(matrix, vector) -> list[float]:
    return [sum(a * b for a, b in zip(row, vector, strict=True)) for row in matrix]


def lab(colour: str, eyes) -> tuple[float, float, float]:
    seen = [min(1.0, max(0.0, part)) for part in times(eyes, linear(colour))]
    to_xyz = ((0.4125, 0.3576, 0.1804), (0.2127, 0.7152, 0.0722), (0.0193, 0.1192, 0.9503))
    white = (0.9505, 1.0, 1.0888)
    x, y, z = (part / w for part, w in zip(times(to_xyz, seen), white, strict=True))
    x, y, z = (p ** (1 / 3) if p > 0.008856 else 7.787 * p + 16 / 116 for p in (x, y, z))
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)
