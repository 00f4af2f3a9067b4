"""Tables and drawings of what comparisons have appended to their files, over days perhaps."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from thinwire_lab.errors import Refused
from thinwire_lab.jobs.job import LOWER
from thinwire_lab.report import scores, style
from thinwire_lab.report.comparison import table
from thinwire_lab.runs.ledger import Line
from thinwire_lab.runs.loop import Outcome


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
    groups, name = _group(lines)
    sign = 1 if name in LOWER else -1
    means = {call: sign * statistics.mean(o.figures.get(name, math.nan) for o in outcomes)
             for call, outcomes in groups.items()}  # fmt: skip
    worst = {call: mean if mean == mean else math.inf for call, mean in means.items()}
    return sorted(lines, key=lambda line: worst[line.outcome.recipe])


def _group(lines: Sequence[Line]) -> tuple[scores.Groups, str]:
    """The outcomes of each recipe, and the figure that the job is judged by."""
    return scores.by_recipe([line.outcome for line in lines]), scores.headline(lines[0].outcome)


def tables(lines: Sequence[Line], reach: float | None = None) -> dict[str, list[list[str]]]:
    """A table a place; with `reach`, how long and how many megabytes it took to that score."""
    made = {}
    for place, mine in places(lines).items():
        rows = table([line.outcome for line in mine])
        made[place] = rows if reach is None else _with_reach(rows, mine, reach)
    return made


def markdown(rows: list[list[str]]) -> str:
    """Rows, of which the first is the head, as Markdown."""
    head, *rest = rows
    bar = "\\|"  # as a cell has it
    rest = [[f"`{call.replace('|', bar)}`", *cells] for call, *cells in rest]
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rest])


def drawing(lines: Sequence[Line]) -> Any:
    """Scores against seconds of training, a chart per place."""
    charts = {}
    for place, mine in places([line for line in lines if line.scores]).items():
        groups, name = _group(mine)
        if sum(len(line.scores) for line in mine) > 1:
            charts[place] = (3.1 + style.lines_of(groups), partial(_draw_way, mine, groups, name))
    if not charts:
        raise Refused("no scores to draw: a line needs two on the way; compare again with --set "
                      "score_every=0.25")  # fmt: skip
    return _stack(charts)


def _draw_way(lines: Sequence[Line], groups: scores.Groups, name: str, axes: Any) -> None:
    runs = [(line.outcome.recipe, line.scores) for line in lines]
    scores.draw_curves(axes, runs, "elapsed", name, {recipe: recipe for recipe in groups})
    scores.draw_references(axes, groups, name)


def scatter(lines: Sequence[Line]) -> Any:
    """What every recipe reached against what it saved, a chart per place."""
    charts, told = {}, []
    for place, mine in places(lines).items():
        groups, name = _group(mine)
        if scores.comparable(groups, name):
            charts[place] = (4.6, partial(scores.draw_scatter, groups=groups, name=name))
        else:
            told.append(scores.tell(groups, name))
    if not charts:
        raise Refused(" ".join(told))
    return _stack(charts, columns=2)


def race(lines: Sequence[Line], reach: float | None = None) -> Any:
    """Dense, 16 bits and the soonest other recipe on their way to a score, a chart per place.

    Args:
        lines: What comparisons have appended.
        reach: The score; if None, what dense ends with less one point (or a hundredth of it, if
            it is no share).
    """
    charts = {}
    for place, mine in places([line for line in lines if line.scores]).items():
        groups, name = _group(mine)
        dense = scores.reference(groups, style.DENSE)
        goal = reach if dense is None or reach is not None else _near(groups[dense], name)
        if goal is None:
            raise Refused(f"{place} has no dense run to set the score; give it with --reach")
        times = {recipe: _mean_time(mine, recipe, name, goal) for recipe in groups}
        half = scores.reference(groups, style.HALF)
        others = [recipe for recipe in groups if recipe not in (dense, half)]
        best = min(others, key=lambda recipe: times[recipe], default=None)
        chosen = {recipe: times[recipe] for recipe in (dense, half, best) if recipe is not None}
        charts[place] = (3.2, partial(_draw_race, mine, chosen, name, goal))
    if not charts:
        raise Refused("these results hold no scores to draw; compare again with this version")
    return _stack(charts, legend=False)


def _near(dense: Sequence[Outcome], name: str) -> float:
    middle, _ = scores.spread(dense, name)
    apart = 0.01 if scores.in_percent(name) else 0.01 * middle
    return middle + apart if name in LOWER else middle - apart


def _mean_time(lines: Sequence[Line], recipe: str, name: str, goal: float) -> float:
    """Seconds until every seed was there; infinite if one never was."""
    firsts = [
        scores.reached(line.scores, name, goal) for line in lines if line.outcome.recipe == recipe
    ]
    return statistics.mean(math.inf if first is None else first["elapsed"] for first in firsts)


def _draw_race(
    lines: Sequence[Line], times: Mapping[str, float], name: str, goal: float, axes: Any
) -> None:
    runs = [(m.outcome.recipe, m.scores) for m in lines if m.outcome.recipe in times]
    scores.draw_curves(axes, runs, "elapsed", name, {recipe: recipe for recipe in times})
    low, high = axes.get_ylim()
    axes.axhline(goal, color=style.INK, linewidth=1, linestyle=(0, (1, 2)))
    for recipe, seconds in times.items():
        colour = style.family(recipe).colour
        if math.isfinite(seconds):
            axes.vlines(seconds, low, goal, color=colour, linewidth=1, linestyle=(0, (1, 2)))
            text = f"{style.NAMES.get(recipe, style.name_of(recipe))}\n{seconds:.0f} s"
            style.write(axes, text, (seconds, goal), (0, 9), colour, style.TEXT)
    axes.set_yticks([tick for tick in axes.get_yticks() if low <= tick <= max(high, goal)])
    axes.set_ylim(low, max(high, goal) + 0.22 * (high - low))
    axes.set_xlim(0, 1.08 * axes.get_xlim()[1])
    across = (
        f"{scores.LABELS['elapsed']}, dotted where {scores.format_score(name, goal)} is reached"
    )
    style.label(axes, across, name)


def _stack(
    charts: Mapping[str, tuple[float, Callable[[Any], None]]], columns: int = 1, legend: bool = True
) -> Any:
    """Charts below each other, each with its title, height and legend."""
    heights = [height for height, _ in charts.values()]
    figure = style.blank(style.COLUMN, sum(heights))
    parts = figure.subfigures(len(heights), 1, squeeze=False, height_ratios=heights)
    for part, (place, (_, draw_into)) in zip(parts[:, 0], charts.items(), strict=True):
        axes = part.subplots()
        style.plain(axes)
        draw_into(axes)
        axes.set_title(style.wrap(style.as_text(place)), fontsize=style.TINY, color=style.INK,
                       loc="left")  # fmt: skip
        if legend:
            style.legend_below(part, axes, columns)
    return figure


def check_kind(path: Path) -> None:
    if path.suffix[1:].lower() not in style.KINDS:
        raise Refused(f"cannot draw {path}; give a name that ends in .{', .'.join(style.KINDS)}")


def _with_reach(rows: list[list[str]], lines: list[Line], value: float) -> list[list[str]]:
    name = scores.headline(lines[0].outcome)
    shown = f"{100 * value:g} %" if scores.in_percent(name) else f"{value:g}"
    head, *rest = rows
    made = [[*head, f"s to {shown}", f"MB to {shown}"]]
    for call, *cells in rest:
        found = [
            scores.reached(line.scores, name, value)
            for line in lines
            if line.outcome.recipe == call
        ]
        first = [score for score in found if score is not None]
        cells += ["never", ""] if len(first) < len(found) else [
            f"{statistics.mean(score['elapsed'] for score in first):.0f}",
            f"{statistics.mean(score['bytes_sent'] for score in first) / 1e6:.1f}",
        ]  # fmt: skip
        made.append([call, *cells])
    return made
