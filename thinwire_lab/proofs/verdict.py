"""From notes to a verdict: what the theory asks for, what was measured, and by how much it held.

What holds on average is asked of every parameter by itself, over the steps: the worst one counts,
less what chance may add to so few steps.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from thinwire_lab.proofs.observe import Note

ROUNDING = 1e-3
SURE = 4.0  # standard errors that chance may add
TINY = 1e-9
GROWTH = 4.0  # how much larger a quantity may be at the end than at the start to be called bounded


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One question. `held` is None where it is only told, or cannot be asked."""

    what: str
    value: float
    limit: float
    held: bool | None
    about: str
    where: str = ""  # the parameter it was measured at

    @property
    def margin(self) -> float:
        return self.limit - self.value


def verdicts(
    notes: Sequence[Note], divergence: float, remembers: bool = True, by_rows: bool = False
) -> list[Verdict]:
    """The table of one recipe; `divergence` is the largest difference between replicas.

    `remembers`: it has a memory. `by_rows`: it promises to leave no row out.
    """
    sparse = [n for n in notes if n.sparse]
    return [
        _at_most("replicas differ by", divergence, 0.0, "parameters are the same on all ranks"),
        _at_worst("mass lost", notes, lambda n: n.mass, ROUNDING,
                  "the mean is the average of what ranks sent: the conservation law"),
        _lost(notes, remembers),
        _on_average("contraction over bound", notes, lambda n: n.contraction - n.bound, ROUNDING,
                    "|x - C(x)|^2 <= (1 - k/n) |x|^2 (Stich et al. 2018); <= |x|^2 if all is sent"),
        _xi(sparse, notes),
        _on_average("top-k over rand-k", sparse, lambda n: n.delta, 1.0,
                    "the mean is no farther from mean x than k random entries (gTop-k, 2019)"),
        _residual(notes),
        _rows(sparse, by_rows),
        _told("support overlap", _mean(sparse, lambda n: n.overlap), "share common to two ranks"),
        _told("density", _density(notes), "entries that rank 0 chose and that arrived, of all"),
    ]  # fmt: skip


def _lost(notes: Sequence[Note], remembers: bool) -> Verdict:
    """Without a memory, only what is rounded up as often as down comes back: on average."""
    about = "what was not sent comes back in the next step, or is rounding that is fair"
    if not remembers:
        return _on_average("residual lost", notes, lambda n: n.lost, ROUNDING, about)
    return _at_worst(  # neither less than was left, nor more, nor anything else
        "residual lost", notes, lambda n: max(abs(n.lost), n.strange), ROUNDING, about
    )


def _xi(sparse: Sequence[Note], notes: Sequence[Note]) -> Verdict:
    """Assumed of selections only; of others it is told."""
    about = "|C(mean x) - mean C(x)| <= xi |mean g| (Alistarh et al. 2018; Ok-Topk, eq. 5)"
    if not sparse:
        return _told("xi", _mean(notes, lambda n: n.xi), about)
    return _bounded("xi", sparse, lambda n: n.xi, about)


def _rows(sparse: Sequence[Note], promised: bool) -> Verdict:
    """Asked of who promises it; of others it is told."""
    about = "every row of every matrix is touched in every step (ADTopk)"
    value = _mean([note for note in sparse if note.rows > 1], lambda n: n.missing)
    if not promised:
        return _told("rows missing", value, about)
    return _at_most("rows missing", value, 0.0, about)


def _residual(notes: Sequence[Note]) -> Verdict:
    about = (
        "|residual| / max |g| <= 2 sqrt(1 - d) / d, d = k/n or as seen (Karimireddy et al. 2019)"
    )
    known = [note for note in notes if 0 < note.limit < math.inf]
    worst = max(known, key=lambda n: n.residual / n.limit, default=None)
    if worst is None:
        return _told("residual over gradient", float("nan"), about)
    return _at_most("residual over gradient", worst.residual, worst.limit, about, worst.name)


def _bounded(what: str, notes: Sequence[Note], of: Callable[[Note], float], about: str) -> Verdict:
    """Does not grow: the last third of the steps against the first, once the residual is there."""
    rising = 1 / max(TINY, _density(notes))  # steps until every entry had its turn, about
    every = sorted({note.step for note in notes})
    steps = [step for step in every if step >= min(rising, every[-1] / 2)]
    third = len(steps) // 3
    if third == 0:
        return _told(what, _mean(notes, of), about)
    early, late = set(steps[:third]), set(steps[-third:])
    first = _mean([n for n in notes if n.step in early], of)
    last = _mean([n for n in notes if n.step in late], of)
    return _at_most(what, last, max(GROWTH * first, ROUNDING), f"{about}; does not grow")


def _at_worst(
    what: str, notes: Sequence[Note], of: Callable[[Note], float], limit: float, about: str
) -> Verdict:
    """Of any parameter in any step."""
    asked = [(of(note), note.name) for note in notes if not math.isnan(of(note))]
    value, where = max(asked, default=(math.nan, ""))
    return _at_most(what, value, limit, about, where)


def _on_average(
    what: str, notes: Sequence[Note], of: Callable[[Note], float], limit: float, about: str
) -> Verdict:
    """Of the worst parameter, over the steps."""
    by_name: dict[str, list[float]] = {}
    for note in notes:
        if not math.isnan(of(note)):
            by_name.setdefault(note.name, []).append(of(note))
    asked = [(_surely(values), name) for name, values in by_name.items()]
    value, where = max(asked, default=(math.nan, ""))
    return _at_most(what, value, limit, about, where)


def _surely(values: list[float]) -> float:
    """The mean, less what chance may have added."""
    if len(values) < 2:
        return values[0]
    return statistics.mean(values) - SURE * statistics.stdev(values) / math.sqrt(len(values))


def _at_most(what: str, value: float, limit: float, about: str, where: str = "") -> Verdict:
    held = None if math.isnan(value) or math.isnan(limit) else value <= limit
    return Verdict(what=what, value=value, limit=limit, held=held, about=about, where=where)


def _told(what: str, value: float, about: str) -> Verdict:
    return Verdict(what=what, value=value, limit=float("nan"), held=None, about=about)


def _mean(notes: Sequence[Note], of: Callable[[Note], float]) -> float:
    values = [value for value in map(of, notes) if not math.isnan(value)]
    return statistics.mean(values) if values else float("nan")


def _density(notes: Sequence[Note]) -> float:
    entries = sum(note.density * note.numel for note in notes)
    return entries / max(1, sum(note.numel for note in notes))
