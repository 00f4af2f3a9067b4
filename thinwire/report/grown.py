"""Tables and drawings of what comparisons have appended to their files, over days perhaps."""

from __future__ import annotations

import io
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from thinwire.jobs import logs
from thinwire.jobs.job import LOWER
from thinwire.jobs.ledger import Line
from thinwire.jobs.loop import Outcome
from thinwire.lab.workers import Refused
from thinwire.report.compared import (
    as_text,
    by_recipe,
    curves,
    headline,
    in_percent,
    legend_below,
    lines_of,
    plain,
    table,
)
from thinwire.report.pattern import HUES, PAPER

KINDS = ("png", "svg", "pdf")
ACROSS = ("step", "bytes_sent", "elapsed")


def places(lines: Sequence[Line]) -> dict[str, list[Line]]:
    """What belongs into one table: a job at one size and settings, on one data set and network.

    The best recipe comes first, those of which a run diverged last.
    """
    found: dict[str, list[Line]] = {}
    for line in lines:
        beside = [other.settings for other in lines if other.place == line.place]
        apart = [name for name, value in line.settings.items()
                 if any(other.get(name) != value for other in beside)]  # fmt: skip
        origins = {other.origin for other in lines if other.place == line.place and other.origin}
        elsewhere = [f"data {line.origin}"] if line.origin and len(origins) > 1 else []
        differs = [f"{name} {line.settings[name]}" for name in apart]
        title = ", ".join([line.place, *elsewhere, *differs])
        found.setdefault(title, []).append(line)
    return {title: _best_first(mine) for title, mine in found.items()}


def _best_first(lines: list[Line]) -> list[Line]:
    name = headline(lines[0].outcome)
    groups = by_recipe([line.outcome for line in lines])
    sign = 1 if name in LOWER else -1
    means = {call: sign * statistics.mean(o.figures.get(name, math.nan) for o in outcomes)
             for call, outcomes in groups.items()}  # fmt: skip
    worst = {call: mean if mean == mean else math.inf for call, mean in means.items()}
    return sorted(lines, key=lambda line: worst[line.outcome.recipe])


def tables(lines: Sequence[Line], reach: float | None = None) -> dict[str, list[list[str]]]:
    """A table a place; with `reach`, how long and how many megabytes it took to that score."""
    made = {}
    for place, mine in places(lines).items():
        rows = table([line.outcome for line in mine])
        made[place] = rows if reach is None else _with_reach(rows, mine, reach)
    return made


def reached(line: Line, value: float) -> dict[str, float] | None:
    """The first score that is as good as this one."""
    name = headline(line.outcome)
    for score in line.scores:
        if score[name] <= value if name in LOWER else score[name] >= value:
            return score
    return None


def markdown(rows: list[list[str]]) -> str:
    """Rows, of which the first is the head, as Markdown."""
    head, *rest = rows
    bar = "\\|"  # as a cell has it
    rest = [[f"`{call.replace('|', bar)}`", *cells] for call, *cells in rest]
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rest])


def drawing(lines: Sequence[Line]) -> Any:
    """Scores against steps, bytes and seconds, a row of three a place."""
    from matplotlib.figure import Figure

    rows = places([line for line in lines if line.scores])
    if not rows:
        raise Refused("these results hold no scores to draw; compare again with this version")
    recipes = [line.outcome.recipe for line in lines]
    heights = [3.0 + lines_of({m.outcome.recipe for m in mine}) for mine in rows.values()]
    size = (4.2 * len(ACROSS), sum(heights))
    figure = Figure(figsize=size, facecolor=PAPER, layout="constrained")
    bands = figure.subfigures(len(rows), 1, squeeze=False, height_ratios=heights)[:, 0]
    for band, (place, mine) in zip(bands, rows.items(), strict=True):
        axes = band.subplots(1, len(ACROSS), sharey=True)
        runs, name = [(m.outcome.recipe, m.scores) for m in mine], headline(mine[0].outcome)
        for one, across in zip(axes, ACROSS, strict=True):
            curves(one, runs, across, name, recipes)
            plain(one)
        axes[0].set_title(place, fontsize=9, loc="left")
        axes[0].set_ylabel(name)
        legend_below(band, axes[0])
    return figure


def scatter(lines: Sequence[Line]) -> Any:
    """What every recipe reached against what it sent, a drawing a place; seeds as a bar."""
    from matplotlib.figure import Figure

    rows = places(lines)
    groups = {place: by_recipe([line.outcome for line in mine]) for place, mine in rows.items()}
    heights = [4.5 + lines_of(recipes) for recipes in groups.values()]
    figure = Figure(figsize=(9.0, sum(heights)), facecolor=PAPER, layout="constrained")
    bands = figure.subfigures(len(rows), 1, squeeze=False, height_ratios=heights)[:, 0]
    for band, (place, recipes) in zip(bands, groups.items(), strict=True):
        axes = band.subplots()
        axes.set_title(place, fontsize=9, loc="left")
        _points(axes, list(recipes.values()))
        plain(axes)
        text = "\n".join(f"{n}  {as_text(recipe)}" for n, recipe in enumerate(recipes, 1))
        band.supxlabel(text, x=0.01, ha="left", fontsize=6.5, linespacing=1.3)
    return figure


def _points(axes: Any, recipes: list[list[Outcome]]) -> None:
    """A number for every recipe; one of which a run diverged has none to stand at."""
    name = headline(recipes[0][0])
    for number, found in enumerate(recipes, 1):
        scores = [outcome.figures.get(name, math.nan) for outcome in found]
        sent = statistics.mean(outcome.metrics["bytes_sent"] for outcome in found) / 1e6
        colour, middle = HUES[number % len(HUES)], statistics.mean(scores)
        if math.isfinite(middle):
            axes.plot([sent, sent], [min(scores), max(scores)], color=colour, linewidth=1)
            axes.plot([sent], [middle], marker="o", markersize=4, color=colour)
            axes.annotate(str(number), (sent, middle), xytext=(4, 2), fontsize=7, color=colour,
                          textcoords="offset points")  # fmt: skip
    if all(found[0].metrics["bytes_sent"] for found in recipes):  # one worker sends nothing
        axes.set_xscale("log")
    axes.set_xlabel("MB sent by a worker in the whole training")
    axes.set_ylabel(name)


def check_kind(path: Path) -> None:
    if path.suffix[1:].lower() not in KINDS:
        raise Refused(f"cannot draw {path}; give a name that ends in .{', .'.join(KINDS)}")


def draw(figure: Any, path: Path) -> None:
    """A drawing as a file of the kind its name says."""
    image = io.BytesIO()
    figure.savefig(image, dpi=110, format=path.suffix[1:].lower())
    logs.written(path, image.getvalue())


def _with_reach(rows: list[list[str]], lines: list[Line], value: float) -> list[list[str]]:
    name = headline(lines[0].outcome)
    shown = f"{100 * value:g} %" if in_percent(name) else f"{value:g}"
    head, *rest = rows
    made = [[*head, f"s to {shown}", f"MB to {shown}"]]
    for call, *cells in rest:
        found = [reached(line, value) for line in lines if line.outcome.recipe == call]
        first = [score for score in found if score is not None]
        cells += ["never", ""] if len(first) < len(found) else [
            f"{statistics.mean(score['elapsed'] for score in first):.0f}",
            f"{statistics.mean(score['bytes_sent'] for score in first) / 1e6:.1f}",
        ]  # fmt: skip
        made.append([call, *cells])
    return made
