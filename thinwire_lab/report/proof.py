"""Proofs as a page: the verdicts of every recipe, and what was measured over the steps."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from thinwire_lab.proofs.observe import Note
from thinwire_lab.proofs.study import Proof, as_rows
from thinwire_lab.report import style
from thinwire_lab.report.comparison import COLUMNS, short_names
from thinwire_lab.report.page import Page, Section, drawing

CURVES: dict[str, Callable[[Note], float]] = {
    "contraction": lambda n: n.contraction,
    "contraction less its bound": lambda n: n.contraction - n.bound,
    "xi": lambda n: n.xi,
    "top-k over rand-k": lambda n: n.delta,
    "residual over gradient": lambda n: n.residual,
    "rows missing": lambda n: n.missing,
    "support overlap": lambda n: n.overlap,
    "density": lambda n: n.density,
}


def page(title: str, proofs: Sequence[Proof]) -> Page:
    broken = [
        f"{proof.recipe} ({', '.join(v.what for v in proof.verdicts if v.held is False)})"
        for proof in proofs
        if not proof.held
    ]
    lead = f"Violated in {'; '.join(broken)}." if broken else "All that is asked holds."
    sections = [
        Section(title=f"{number}. {proof.recipe}", table=as_rows(proof))
        for number, proof in enumerate(proofs, 1)
    ]
    asked = {v.what: v.about for proof in proofs for v in proof.verdicts}
    meaning = Section(
        title="What is asked", points=[f"{what}: {about}" for what, about in asked.items()]
    )
    series = {name: _series(proofs, of) for name, of in CURVES.items()}
    curves = Section(
        title="Over the steps",
        text=["The mean over parameters; worst of all ranks where ranks differ.",
              *(_tell(name, found) for name, found in series.items() if not _long(found))],
        drawings=[drawing(_curve(name, found)) for name, found in series.items() if _long(found)],
    )  # fmt: skip
    return Page(
        title=f"Convergence evidence: {title}", lead=lead, sections=[*sections, meaning, curves]
    )


Series = dict[str, dict[int, float]]  # recipe, step


def _series(proofs: Sequence[Proof], of: Callable[[Note], float]) -> Series:
    found: Series = {}
    for proof in proofs:
        points: dict[int, list[float]] = {}
        for note in proof.notes:
            if of(note) == of(note):
                points.setdefault(note.step, []).append(of(note))
        found[proof.recipe] = {step: statistics.mean(v) for step, v in points.items()}
    return found


def _long(series: Series) -> bool:
    return any(len(points) > 1 for points in series.values())


def _tell(name: str, series: Series) -> str:
    """In words what is too little for a chart."""
    known = [f"{recipe} {value:.4g}" for recipe, points in series.items()
             for value in points.values()]  # fmt: skip
    return f"{name}: {', '.join(known) or 'not measured'}."


def _curve(name: str, series: Series) -> Any:
    names, looks = short_names(list(series)), style.looks(series)
    figure, axes = style.plain_figure(style.COLUMN, 2.8 + style.lines_of(names, COLUMNS))
    for recipe, points in series.items():
        axes.plot(list(points), list(points.values()), label=names[recipe], **looks[recipe])
    style.label(axes, "steps", name)
    style.legend_below(figure, axes, COLUMNS)
    return figure
