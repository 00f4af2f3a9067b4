"""Proofs as a page: the verdicts of every recipe, and what was measured over the steps."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from thinwire.proofs.observe import Note
from thinwire.proofs.study import Proof, as_rows
from thinwire.report.compared import plain_figure
from thinwire.report.page import Page, Section, drawing
from thinwire.report.pattern import HUES

CURVES: dict[str, Callable[[Note], float]] = {
    "contraction |x - C(x)|^2 / |x|^2": lambda n: n.contraction,
    "contraction less its bound": lambda n: n.contraction - n.bound,
    "xi": lambda n: n.xi,
    "top-k over rand-k": lambda n: n.delta,
    "residual over gradient": lambda n: n.residual,
    "rows missing": lambda n: n.missing,
    "support overlap": lambda n: n.overlap,
    "density": lambda n: n.density,
}


def page(title: str, proofs: Sequence[Proof]) -> Page:
    broken = [proof.recipe for proof in proofs if not proof.held]
    lead = (
        "All that is asked holds."
        if not broken
        else f"Something is violated in {', '.join(broken)}."
    )
    sections = [
        Section(
            title=proof.recipe, table=as_rows(proof),
            points=[f"{v.what}: {v.about}" for v in proof.verdicts],
        )
        for proof in proofs
    ]  # fmt: skip
    curves = Section(
        title="Over the steps",
        text=["The mean over parameters; worst of all ranks where ranks differ."],
        drawings=[drawing(_curve(proofs, name, of)) for name, of in CURVES.items()],
    )
    return Page(title=f"Convergence evidence: {title}", lead=lead, sections=[*sections, curves])


def _curve(proofs: Sequence[Proof], name: str, of: Callable[[Note], float]) -> Any:
    figure, axes = plain_figure(5.2, 2.8)
    for number, proof in enumerate(proofs):
        points: dict[int, list[float]] = {}
        for note in proof.notes:
            if of(note) == of(note):
                points.setdefault(note.step, []).append(of(note))
        axes.plot(list(points), [statistics.mean(v) for v in points.values()], marker=".",
                  color=HUES[number % len(HUES)], label=proof.recipe)  # fmt: skip
    axes.set_xlabel("steps")
    axes.set_ylabel(name)
    axes.legend(fontsize=7, frameon=False)
    return figure
