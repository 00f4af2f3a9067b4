"""Trainings side by side: a table, and a page with their curves."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinwire_lab.report import scores, style
from thinwire_lab.report.page import Page, Section, drawing
from thinwire_lab.report.style import COLUMN, INK, TINY
from thinwire_lab.runs import logs, runner
from thinwire_lab.runs.config import Run
from thinwire_lab.runs.loop import Outcome

CELLS = ["loss", "MB", "x less", "messages", "density", "ms", "s"]
COLUMNS = 3  # of short names below a drawing


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A finished run, and all it has logged."""

    run: Run
    outcome: Outcome
    records: list[dict[str, Any]]

    @staticmethod
    def read(folder: Path, run: Run) -> Entry:
        done = runner.read_result(folder)
        if done is None:
            raise ValueError(f"{folder} holds no finished run; run the comparison again to go on")
        return Entry(run=run, outcome=done, records=logs.read_records(folder / logs.LOG))

    @property
    def losses(self) -> list[dict[str, Any]]:
        return [r for r in self.records if "loss" in r]

    @property
    def scores(self) -> list[dict[str, Any]]:
        return [r for r in self.records if scores.headline(self.outcome) in r]


def table(outcomes: Sequence[Outcome]) -> list[list[str]]:
    """A row for every recipe of one job, its seeds together."""
    figures = _figures(outcomes[0])
    rows = [["recipe", *figures, *CELLS]]
    for call, found in scores.by_recipe(outcomes).items():
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


def _cells(outcomes: list[Outcome]) -> list[str]:
    sent = statistics.mean(o.metrics["bytes_sent"] for o in outcomes)
    steps = max(1, outcomes[0].metrics["steps"])
    messages = outcomes[0].metrics.get("messages", float("nan")) / steps
    return [
        f"{statistics.mean(o.loss for o in outcomes):.4f}", f"{sent / 1e6:.2f}",
        f"{scores.saving(outcomes):.1f}" if sent else "",
        f"{messages:.1f}" if messages == messages else "",
        f"{100 * statistics.mean(o.metrics['density'] for o in outcomes):.2f} %",
        f"{1e3 * statistics.median(o.step_seconds for o in outcomes):.1f}",
        f"{statistics.mean(o.seconds for o in outcomes):.1f}",
    ]  # fmt: skip


def _score(outcomes: list[Outcome], name: str) -> str:
    """A figure; of several seeds their mean, standard deviation and number."""
    values = [o.figures[name] for o in outcomes if name in o.figures]
    if not values:
        return ""
    scale, unit = (100, " %") if scores.in_percent(name) else (1, "")
    shown = f"{scale * statistics.mean(values):.4g}{unit}"
    if len(values) == 1:
        return shown
    if not all(map(math.isfinite, values)):  # a run that diverged; its deviation is no number
        return f"{shown} ({len(values)})"
    return f"{shown} ± {scale * statistics.stdev(values):.2g} ({len(values)})"


def page(entries: Sequence[Entry]) -> Page:
    """One section a job."""
    jobs = list(dict.fromkeys(entry.run.job for entry in entries))
    sections: list[Section] = []
    for job in jobs:
        sections += _sections(job, [entry for entry in entries if entry.run.job == job])
    data = dict.fromkeys(f"{entry.run.job}: {entry.run.material}" for entry in entries)
    count = len({entry.run.recipe for entry in entries})
    lead = (
        f"{count} recipe{'s' * (count > 1)}, {entries[0].run.size} size, {len(entries)} "
        f"run{'s' * (len(entries) > 1)}. All runs of a job have the same data "
        f"({'; '.join(data)}), seeds and steps."
    )
    return Page(title=f"Comparison: {', '.join(jobs)}", lead=lead, sections=sections)


def _sections(job: str, entries: list[Entry]) -> list[Section]:
    head, *rows = table([entry.outcome for entry in entries])
    numbered = [head, *([f"{n}. {call}", *cells] for n, (call, *cells) in enumerate(rows, 1))]
    name, groups = (
        scores.headline(entries[0].outcome),
        scores.by_recipe([entry.outcome for entry in entries]),
    )
    text = [
        "MB is what one worker sends in all, messages are its messages per step, ms is the median "
        "step."
    ]
    points = [_scatter(groups, name)] if scores.comparable(groups, name) else []
    curves = [
        _curves(entries, x, y) for x in scores.LABELS for y in ("loss", name) if _long(entries, y)
    ]
    glance = [*points, _phases(entries), *_bars(entries)]
    return [
        Section(title=f"{job}: results", table=numbered, text=text),
        Section(title=f"{job}: {name}, bytes and time", drawings=list(map(drawing, glance)),
                text=() if points else [scores.tell(groups, name)]),
        Section(title=f"{job}: on the way", drawings=list(map(drawing, curves))),
    ]  # fmt: skip


def _long(entries: Sequence[Entry], y: str) -> bool:
    """Whether these records are a curve."""
    return any(len(e.losses if y == "loss" else e.scores) > 1 for e in entries)


def _scatter(groups: scores.Groups, name: str) -> Any:
    figure, axes = style.plain_figure(COLUMN, 4.2)
    scores.draw_scatter(axes, groups, name)
    style.legend_below(figure, axes, 2)
    return figure


def _curves(entries: Sequence[Entry], x: str, y: str) -> Any:
    names = _short(entries)
    runs = [(e.run.recipe, e.losses if y == "loss" else e.scores) for e in entries]
    figure, axes = style.plain_figure(COLUMN, 3 + style.lines_of(names, COLUMNS))
    scores.draw_curves(axes, runs, x, y, names)
    if y != "loss":
        scores.draw_references(axes, scores.by_recipe([entry.outcome for entry in entries]), y)
    style.legend_below(figure, axes, COLUMNS)
    return figure


def _phases(entries: Sequence[Entry]) -> Any:
    """Milliseconds per step of every phase; what is exposed is what the step really waits for."""
    chosen = [e for e in _ones(entries) if "seconds_exposed" in e.outcome.metrics]
    figure, axes = style.plain_figure(COLUMN, 1.1 + 0.4 * max(1, len(chosen)))
    for row, entry in enumerate(chosen):
        steps, left = max(1, entry.outcome.metrics["steps"]), 0.0
        for phase, colour in style.PHASES.items():
            value = 1e3 * entry.outcome.metrics[f"seconds_{phase}"] / steps
            axes.barh(row, value, left=left, color=colour, height=0.6,
                      label=None if row else phase)  # fmt: skip
            left += value
        exposed = 1e3 * entry.outcome.metrics["seconds_exposed"] / steps
        axes.plot([exposed], [row], marker="|", markersize=16, markeredgewidth=2, color=INK,
                  linestyle="none", label=None if row else "exposed")  # fmt: skip
    _name_rows(axes, _short(entries), chosen)
    style.label(axes, "ms per step, on the lane beside backward")
    if chosen:
        style.legend_below(figure, axes, 4)
    return figure


def _bars(entries: Sequence[Entry]) -> list[Any]:
    """Rates and bytes of the recipes; none of one recipe, which the table tells."""
    chosen = _ones(entries)
    if len(chosen) < 2:
        return []
    rates = [1 / max(entry.outcome.step_seconds, 1e-9) for entry in chosen]
    sent = [entry.outcome.metrics["bytes_sent"] / max(1, entry.outcome.metrics["steps"]) / 1e3
            for entry in chosen]  # fmt: skip
    figures = []
    for widths, what in ((rates, "steps per second"), (sent, "KB per step and worker")):
        figure, axes = style.plain_figure(COLUMN, 0.9 + 0.4 * len(chosen))
        colours = [style.family(entry.run.recipe).colour for entry in chosen]
        bars = axes.barh(range(len(chosen)), widths, color=colours, height=0.6)
        axes.bar_label(bars, fmt="{:.4g}", padding=3, fontsize=TINY, color=INK)
        axes.margins(x=0.15)
        _name_rows(axes, _short(entries), chosen)
        style.label(axes, what)
        figures.append(figure)
    return figures


def _name_rows(axes: Any, names: Mapping[str, str], entries: Sequence[Entry]) -> None:
    axes.set_yticks(range(len(entries)), [names[entry.run.recipe] for entry in entries])
    axes.invert_yaxis()


def _short(entries: Sequence[Entry]) -> dict[str, str]:
    return short_names([entry.run.recipe for entry in entries])


def short_names(calls: Sequence[str]) -> dict[str, str]:
    """Names for drawings, which have no room for whole recipes: with their numbers on the page."""
    once = dict.fromkeys(calls)
    return {call: f"{number} {style.name_of(call)}" for number, call in enumerate(once, 1)}


def _ones(entries: Sequence[Entry]) -> list[Entry]:
    """One entry per recipe, that of the first seed."""
    firsts: dict[str, Entry] = {}
    for entry in entries:
        firsts.setdefault(entry.run.recipe, entry)
    return list(firsts.values())
