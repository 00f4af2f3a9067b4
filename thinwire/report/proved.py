"""Proofs as a page: the verdicts of every recipe, and what was measured over the steps."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from thinwire.proofs.observe import Note
from thinwire.proofs.study import Proof, as_rows
from thinwire.report.compared import (
    COLUMNS,
    DASHES,
    legend_below,
    lines_of,
    plain_figure,
    short_names,
)
from thinwire.report.page import Page, Section, drawing
from thinwire.report.pattern import HUES

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
    curves = Section(
        title="Over the steps",
        text=["The mean over parameters; worst of all ranks where ranks differ."],
        drawings=[drawing(_curve(proofs, name, of)) for name, of in CURVES.items()],
    )
    return Page(
        title=f"Convergence evidence: {title}", lead=lead, sections=[*sections, meaning, curves]
    )


def _curve(proofs: Sequence[Proof], name: str, of: Callable[[Note], float]) -> Any:
    names = short_names([proof.recipe for proof in proofs])
    figure, axes = plain_figure(5.2, 2.5 + lines_of(names) / COLUMNS)
    for number, proof in enumerate(proofs):
        points: dict[int, list[float]] = {}
        for note in proof.notes:
            if of(note) == of(note):
                points.setdefault(note.step, []).append(of(note))
        axes.plot(list(points), [statistics.mean(v) for v in points.values()], marker=".",
                  color=HUES[number % len(HUES)], label=names[proof.recipe],
                  linestyle=DASHES[number // len(HUES) % len(DASHES)])  # fmt: skip
    axes.set_xlabel("steps")
    axes.set_ylabel(name)
    legend_below(figure, axes, COLUMNS)
    return figure
