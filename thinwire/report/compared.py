"""Trainings side by side: a table, and a page with their curves."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinwire.jobs import logs, runner
from thinwire.jobs.config import Run
from thinwire.jobs.loop import Outcome
from thinwire.report.page import Page, Section, drawing
from thinwire.report.pattern import FAINT, HUES, INK, PAPER

PHASES = ("select", "exchange", "scatter", "exposed")
CELLS = ["loss", "MB", "x less", "messages", "density", "ms", "s"]
COLUMNS = 4  # of short names below a drawing
SMOOTH = 20  # steps over which losses are averaged to be drawn
DASHES = ("-", "--", ":", "-.")  # every hue with each
LABELS = {"step": "steps", "bytes_sent": "MB sent by a worker", "elapsed": "seconds of training"}


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A finished run, and all it has logged."""

    run: Run
    outcome: Outcome
    records: list[dict[str, Any]]

    @staticmethod
    def read(folder: Path, run: Run) -> Entry:
        done = runner.result(folder)
        if done is None:
            raise ValueError(f"{folder} holds no finished run; run the comparison again to go on")
        return Entry(run=run, outcome=done, records=logs.records(folder / logs.LOG))

    @property
    def losses(self) -> list[dict[str, Any]]:
        return [r for r in self.records if "loss" in r]

    @property
    def scores(self) -> list[dict[str, Any]]:
        return [r for r in self.records if headline(self.outcome) in r]


def headline(outcome: Outcome) -> str:
    return next(iter(outcome.figures), "loss")


def table(outcomes: Sequence[Outcome]) -> list[list[str]]:
    """A row for every recipe of one job, its seeds together."""
    figures = _figures(outcomes[0])
    rows = [["recipe", *figures, *CELLS]]
    for call, found in by_recipe(outcomes).items():
        rows.append([call, *(_score(found, name) for name in figures), *_cells(found)])
    return rows


def _figures(outcome: Outcome) -> list[str]:
    """What a table shows of a score, the headline first; nothing, if it was stopped before one."""
    first, others = list(outcome.figures)[:1], list(outcome.figures)[1:]
    return first + [name for name in others if name != "test_loss"]


def of_jobs(by_job: Mapping[str, Sequence[Outcome]]) -> list[list[str]]:
    """The tables of several jobs in one: figures that differ in kind are told by name."""
    tables = {job: table(outcomes) for job, outcomes in by_job.items()}
    if len(tables) == 1:
        return next(iter(tables.values()))
    rows = [["run", "score", *CELLS]]
    for job, (head, *mine) in tables.items():
        for call, *cells in mine:
            score = f"{head[1]} {cells[0]}" if len(cells) > len(CELLS) else ""
            rows.append([f"{job}, {call}", score, *cells[-len(CELLS) :]])
    return rows


def by_recipe(outcomes: Sequence[Outcome]) -> dict[str, list[Outcome]]:
    groups: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault(outcome.recipe, []).append(outcome)
    return groups


def _cells(outcomes: list[Outcome]) -> list[str]:
    sent = statistics.mean(o.metrics["bytes_sent"] for o in outcomes)
    dense = statistics.mean(o.metrics["bytes_dense"] for o in outcomes)
    steps = max(1, outcomes[0].metrics["steps"])
    messages = outcomes[0].metrics.get("messages", float("nan")) / steps
    return [
        f"{statistics.mean(o.loss for o in outcomes):.4f}", f"{sent / 1e6:.2f}",
        f"{dense / sent:.1f}" if sent else "", f"{messages:.1f}" if messages == messages else "",
        f"{100 * statistics.mean(o.metrics['density'] for o in outcomes):.2f} %",
        f"{1e3 * statistics.median(o.step_seconds for o in outcomes):.1f}",
        f"{statistics.mean(o.seconds for o in outcomes):.1f}",
    ]  # fmt: skip


def _score(outcomes: list[Outcome], name: str) -> str:
    """A figure; of several seeds their mean, standard deviation and number."""
    values = [o.figures[name] for o in outcomes if name in o.figures]
    if not values:
        return ""
    scale, unit = (100, " %") if in_percent(name) else (1, "")
    shown = f"{scale * statistics.mean(values):.4g}{unit}"
    if len(values) == 1:
        return shown
    if not all(map(math.isfinite, values)):  # a run that diverged; its deviation is no number
        return f"{shown} ({len(values)})"
    return f"{shown} ± {scale * statistics.stdev(values):.2g} ({len(values)})"


def in_percent(name: str) -> bool:
    return name in ("f1", "exact_match", "wer", "cer") or name.endswith("accuracy")


def page(entries: Sequence[Entry]) -> Page:
    """One section a job."""
    jobs = list(dict.fromkeys(entry.run.job for entry in entries))
    sections: list[Section] = []
    for job in jobs:
        sections += _sections(job, [entry for entry in entries if entry.run.job == job])
    data = dict.fromkeys(f"{entry.run.job}: {entry.run.material}" for entry in entries)
    count = len({entry.run.recipe for entry in entries})
    lead = (
        f"{count} recipes, {entries[0].run.size} size, {len(entries)} runs; every run of a job has "
        f"the same data ({'; '.join(data)}), seeds and steps."
    )
    return Page(title=f"Comparison: {', '.join(jobs)}", lead=lead, sections=sections)


def _sections(job: str, entries: list[Entry]) -> list[Section]:
    head, *rows = table([entry.outcome for entry in entries])
    numbered = [head, *([f"{n}. {call}", *cells] for n, (call, *cells) in enumerate(rows, 1))]
    name = headline(entries[0].outcome)
    drawings = [
        ("Loss", [_curves(entries, x, "loss") for x in ("step", "bytes_sent", "elapsed")]),
        (name.capitalize(), [_curves(entries, x, name) for x in ("step", "bytes_sent", "elapsed")]),
        ("Where the time goes", [_phases(entries)]),
        ("Throughput and traffic", [_bars(entries)]),
    ]  # fmt: skip
    text = [
        "MB is what one worker sends in all, messages are its messages a step, ms a step's median."
    ]
    first = Section(title=f"{job}: results", table=numbered, text=text)
    return [first, *(
        Section(title=f"{job}: {title}", drawings=[drawing(f) for f in figures])
        for title, figures in drawings
    )]  # fmt: skip


def _curves(entries: Sequence[Entry], x: str, y: str) -> Any:
    names = _short(entries)
    runs = [(names[e.run.recipe], e.losses if y == "loss" else e.scores) for e in entries]
    figure, axes = plain_figure(5.2, 2.9 + lines_of(names) / COLUMNS)
    curves(axes, runs, x, y)
    axes.set_ylabel(y)
    legend_below(figure, axes, COLUMNS)
    return figure


def lines_of(names: Collection[str]) -> float:
    """Inches that a line each of these takes below a drawing."""
    return 0.14 * len(names)


def legend_below(figure: Any, axes: Any, columns: int = 1) -> None:
    """Names of recipes may be long: they get the whole width, and cover no curve."""
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower left", fontsize=6.5,
                  frameon=False, labelspacing=0.3, ncols=columns)  # fmt: skip


def as_text(name: str) -> str:
    """A name for a drawing, where a pair of dollars would be a formula."""
    return name.replace("$", r"\$")


def curves(
    axes: Any, runs: Sequence[tuple[str, list[dict[str, Any]]]], x: str, y: str,
    recipes: Sequence[str] = (),
) -> None:  # fmt: skip
    """Records of several runs, a colour a recipe; losses are smoothed.

    Drawings that are given the same `recipes` have the same colours.
    """
    recipes = list(dict.fromkeys([*recipes, *(recipe for recipe, _ in runs)]))
    named: set[str] = set()
    for recipe, records in runs:
        place, scale = recipes.index(recipe), 1e6 if x == "bytes_sent" else 1
        values = [r[y] for r in records]
        axes.plot([r[x] / scale for r in records], _smooth(values) if y == "loss" else values,
                  color=HUES[place % len(HUES)], label=None if recipe in named else as_text(recipe),
                  linewidth=1.4, marker="." if y != "loss" else None,
                  linestyle=DASHES[place // len(HUES) % len(DASHES)])  # fmt: skip
        named.add(recipe)
    axes.set_xlabel(LABELS[x])
    if x == "bytes_sent" and any(r[x] > 0 for _, records in runs for r in records):
        axes.set_xscale("log")


def _smooth(values: list[float]) -> list[float]:
    return [statistics.mean(values[max(0, i - SMOOTH + 1) : i + 1]) for i in range(len(values))]


def _phases(entries: Sequence[Entry]) -> Any:
    """Milliseconds a step of every phase; what is exposed is what the step really waits for."""
    chosen = [e for e in _ones(entries) if "seconds_exposed" in e.outcome.metrics]
    figure, axes = plain_figure(7.0, 0.9 + 0.45 * max(1, len(chosen)))
    for row, entry in enumerate(chosen):
        steps, left = max(1, entry.outcome.metrics["steps"]), 0.0
        for number, phase in enumerate(PHASES[:3]):
            value = 1e3 * entry.outcome.metrics[f"seconds_{phase}"] / steps
            axes.barh(row, value, left=left, color=HUES[number], height=0.6,
                      label=phase if row == 0 else None)  # fmt: skip
            left += value
        exposed = 1e3 * entry.outcome.metrics["seconds_exposed"] / steps
        axes.plot([exposed], [row], marker="|", markersize=14, color=INK, linestyle="none",
                  label="exposed" if row == 0 else None)  # fmt: skip
    names = _short(entries)
    axes.set_yticks(range(len(chosen)), [names[entry.run.recipe] for entry in chosen])
    axes.invert_yaxis()
    axes.set_xlabel("ms a step, on the lane beside backward")
    if chosen:
        axes.legend(
            loc="lower left", bbox_to_anchor=(0, 1), ncols=4, fontsize=7, frameon=False, borderpad=0
        )  # above, where it covers no bar
    return figure


def _bars(entries: Sequence[Entry]) -> Any:
    chosen = _ones(entries)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 0.9 + 0.35 * len(chosen)), facecolor=PAPER, layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    rates = [1 / max(entry.outcome.step_seconds, 1e-9) for entry in chosen]
    left.barh(range(len(chosen)), rates, color=HUES[0])
    left.set_yticks(range(len(chosen)), list(_short(entries).values()))
    left.set_xlabel("steps a second")
    left.invert_yaxis()
    sent = [entry.outcome.metrics["bytes_sent"] / max(1, entry.outcome.metrics["steps"]) / 1e3
            for entry in chosen]  # fmt: skip
    right.barh(range(len(chosen)), sent, color=HUES[1])
    right.set_xlabel("KB a step from a worker")
    if any(sent):  # one worker sends nothing
        right.set_xscale("log")
    for axes in (left, right):
        plain(axes)
    return figure


def _short(entries: Sequence[Entry]) -> dict[str, str]:
    return short_names([entry.run.recipe for entry in entries])


def short_names(calls: Sequence[str]) -> dict[str, str]:
    """Names for drawings, which have no room for whole recipes: with their numbers on the page."""
    once = dict.fromkeys(calls)
    return {call: f"{number} {call.split('(')[0]}" for number, call in enumerate(once, 1)}


def _ones(entries: Sequence[Entry]) -> list[Entry]:
    """One entry a recipe, that of the first seed."""
    return [entry for entry in entries if entry is _first(entries, entry.run.recipe)]


def _first(entries: Sequence[Entry], recipe: str) -> Entry:
    return next(entry for entry in entries if entry.run.recipe == recipe)


def plain_figure(width: float, height: float) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), facecolor=PAPER, layout="constrained")
    axes = figure.subplots()
    plain(axes)
    return figure, axes


def plain(axes: Any) -> None:
    axes.tick_params(colors=INK, labelsize=8)
    axes.grid(color=FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
