"""Scores in drawings: on their way and against bytes, with dense and 16 bits to compare with."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from thinwire_lab.jobs.job import LOWER
from thinwire_lab.report import style
from thinwire_lab.report.style import INK
from thinwire_lab.runs.loop import Outcome

SMOOTH = 20  # steps over which losses are averaged to be drawn
LABELS = {"step": "steps", "bytes_sent": "MB sent by a worker", "elapsed": "seconds of training"}
Groups = Mapping[str, Sequence[Outcome]]


def headline(outcome: Outcome) -> str:
    """The figure that a job is judged by."""
    return next(iter(outcome.figures), "loss")


def by_recipe(outcomes: Sequence[Outcome]) -> dict[str, list[Outcome]]:
    """The seeds of each recipe."""
    groups: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault(outcome.recipe, []).append(outcome)
    return groups


def in_percent(name: str) -> bool:
    return name in ("f1", "exact_match", "wer", "cer") or name.endswith("accuracy")


def spread(outcomes: Sequence[Outcome], name: str) -> tuple[float, float]:
    """Mean and standard deviation over the seeds; not a number if a run diverged."""
    values = [outcome.figures.get(name, math.nan) for outcome in outcomes]
    if not all(map(math.isfinite, values)):
        return math.nan, 0.0
    return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def format_score(name: str, value: float) -> str:
    """A figure as tables and drawings have it."""
    return f"{100 * value:.4g} %" if in_percent(name) else f"{value:.4g}"


def reference(groups: Groups, family: style.Family) -> str | None:
    """The recipe that stands for dense or for 16 bits: PyTorch's own if it was run."""
    names = {style.name_of(recipe): recipe for recipe in groups}
    return next((names[name] for name in family.recipes if name in names), None)


def draw_references(axes: Any, groups: Groups, name: str) -> None:
    """A line at what dense ends with and one at what 16 bits do; the seeds' deviation as a band."""
    for family in (style.DENSE, style.HALF):
        recipe = reference(groups, family)
        middle, apart = spread(groups[recipe], name) if recipe else (math.nan, 0.0)
        if recipe and math.isfinite(middle):
            own = style.name_of(recipe)
            text = (
                f"{family.name}{f' ({own})' * (own != family.name)}: {format_score(name, middle)}"
            )
            axes.hlines(middle, 0, 1, transform=axes.get_yaxis_transform(), colors=family.colour,
                        linestyles=(0, (4, 2)), linewidth=1.1, label=text, zorder=1)  # fmt: skip
            axes.axhspan(middle - apart, middle + apart, color=family.colour, alpha=0.09, lw=0)


def draw_curves(
    axes: Any, runs: Sequence[tuple[str, list[dict[str, Any]]]], x: str, y: str,
    names: Mapping[str, str],
) -> None:  # fmt: skip
    """Records of several runs, each in the look of its recipe in `names`; losses are smoothed."""
    looks, told = style.looks(names), set()
    for recipe, records in runs:
        scale = 1e6 if x == "bytes_sent" else 1
        values, text = [r[y] for r in records], style.as_text(names[recipe])
        look = looks[recipe] | ({"marker": None} if y == "loss" else {})
        axes.plot([r[x] / scale for r in records], _smooth(values) if y == "loss" else values,
                  **look, label=None if recipe in told else text)  # fmt: skip
        told.add(recipe)
    style.label(axes, LABELS[x], y)
    if in_percent(y):
        style.in_percent(axes.yaxis)
    if x == "bytes_sent" and any(r[x] > 0 for _, records in runs for r in records):
        axes.set_xscale("log")
        style.in_numbers(axes.xaxis)


def _smooth(values: list[float]) -> list[float]:
    return [statistics.mean(values[max(0, i - SMOOTH + 1) : i + 1]) for i in range(len(values))]


def saving(outcomes: Sequence[Outcome]) -> float:
    """How many times fewer bytes than dense; not a number where nothing was sent."""
    sent = statistics.mean(outcome.metrics["bytes_sent"] for outcome in outcomes)
    dense = statistics.mean(outcome.metrics["bytes_dense"] for outcome in outcomes)
    return dense / sent if sent else math.nan


def place_points(groups: Groups, name: str) -> dict[str, tuple[float, float]]:
    """Where each recipe stands: times fewer bytes, and the mean score. One that diverged is not."""
    found = {recipe: (saving(mine), spread(mine, name)[0]) for recipe, mine in groups.items()}
    return {recipe: at for recipe, at in found.items() if all(map(math.isfinite, at))}


def comparable(groups: Groups, name: str) -> bool:
    """Whether there are two points to draw, which is the least that a picture compares."""
    return len(place_points(groups, name)) > 1


def tell(groups: Groups, name: str) -> str:
    """In words what is too little for a picture."""
    told = [f"{recipe} ends with {name} {format_score(name, spread(mine, name)[0])}, "
            f"{mine[0].metrics['bytes_sent'] / 1e6:.4g} MB sent by a worker"
            for recipe, mine in groups.items()]  # fmt: skip
    return f"{'; '.join(told)}. A picture needs two recipes that sent something."


def front(points: Mapping[str, tuple[float, float]], lower: bool) -> list[str]:
    """Recipes that no other beats in both score and bytes, the smallest saving first."""
    sign = -1 if lower else 1
    best: list[str] = []
    for recipe in sorted(points, key=lambda r: (points[r][0], sign * points[r][1]), reverse=True):
        if not best or sign * points[recipe][1] > sign * points[best[-1]][1]:
            best.append(recipe)
    return best[::-1]


def draw_scatter(axes: Any, groups: Groups, name: str) -> None:
    """What every recipe reached by how many times fewer bytes, the Pareto front, the references.

    Only the front and the references are named; what is far below all others stands at the edge.
    """
    points, lower = place_points(groups, name), name in LOWER
    edge = _edge([y for _, y in points.values()], lower)
    below = {r: y for r, (_, y) in points.items() if (y > edge if lower else y < edge)}
    style.label(axes, "times fewer bytes than dense", name)
    axes.set_xscale("log")
    style.in_numbers(axes.xaxis)
    if in_percent(name):
        style.in_percent(axes.yaxis)
    draw_references(axes, groups, name)
    best = [r for r in front(points, lower) if r not in below]
    axes.plot(*zip(*(points[r] for r in best), strict=True), color=INK, linewidth=1, alpha=0.5,
              drawstyle="steps-pre", zorder=1.5, label="Pareto front")  # fmt: skip
    for family in (*style.FAMILIES, style.OTHER):
        mine = [r for r in points if style.family(r) is family and r not in below]
        for number, recipe in enumerate(mine):
            (x, y), apart = points[recipe], spread(groups[recipe], name)[1]
            axes.vlines(x, y - apart, y + apart, color=family.colour, linewidth=1)
            axes.plot([x], [y], color=family.colour, marker=family.mark, markersize=7,
                      linestyle="none", markeredgecolor=style.PAPER, markeredgewidth=0.6,
                      label=None if number else family.name)  # fmt: skip
    _draw_edge(axes, points, below, name)
    axes.margins(x=0.07, y=0.07)
    if lower:
        axes.invert_yaxis()  # better is above, always
    halves = [reference(groups, family) for family in (style.DENSE, style.HALF)]
    named = dict.fromkeys([*best[::-1], *(r for r in halves if r in points and r not in below)])
    notes = [(*points[r], style.name_of(r), style.family(r).colour) for r in named if r]
    lines = [(x, points[r][1]) for r in halves if r in points for x, _ in points.values()]
    style.place_notes(axes, notes, [*points.values(), *lines])


def _edge(values: Sequence[float], lower: bool) -> float:
    """What is worse than this would press all others together."""
    if len(values) < 8:
        return math.inf if lower else -math.inf
    first, _, third = statistics.quantiles(values, n=4)
    return third + 2 * (third - first) if lower else first - 2 * (third - first)


def _draw_edge(
    axes: Any, points: Mapping[str, tuple[float, float]], below: Mapping[str, float], name: str
) -> None:
    """A mark at the edge for each that lies beyond it."""
    for recipe in below:
        axes.plot([points[recipe][0]], [0.02], transform=axes.get_xaxis_transform(), marker="v",
                  markersize=6, linestyle="none", color=style.family(recipe).colour)  # fmt: skip
    if below:
        worst = (max if name in LOWER else min)(below.values())
        axes.plot([], [], linestyle="none", marker="v", color=style.FAINT,
                  label=f"below the edge, to {format_score(name, worst)}")  # fmt: skip


def reached(scores: Sequence[dict[str, float]], name: str, value: float) -> dict[str, float] | None:
    """The first score that is as good as this one."""
    for score in scores:
        if score[name] <= value if name in LOWER else score[name] >= value:
            return score
    return None
