"""A training under observation, and what the papers' assumptions come to in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn

from thinwire.bucket import by_row
from thinwire.combinators import InBasis, memories
from thinwire.describe import parts
from thinwire.protocols import Reducer
from thinwire.reducers import Select
from thinwire_lab.proofs.observe import Note, Observer, observed
from thinwire_lab.proofs.verdict import Verdict, verdicts


@dataclass(frozen=True, kw_only=True)
class Proof:
    """One recipe: everything seen, and the verdicts."""

    recipe: str
    notes: list[Note]
    verdicts: list[Verdict]

    @property
    def held(self) -> bool:
        return all(verdict.held is not False for verdict in self.verdicts)


class Study:
    """Give `wrap` to whatever trains the recipe, then `close` with the trained network."""

    def __init__(self, recipe: Reducer, every: int) -> None:
        self._observer = Observer(every=every)
        self._remembers = bool(memories(recipe))
        self._by_rows = leaves_no_row_out(recipe)
        self._divergence = 0.0

    def wrap(self, recipe: Reducer) -> Reducer:
        wrapped: Reducer = observed(recipe, self._observer)
        return wrapped

    def close(self, net: nn.Module) -> None:
        self._divergence = divergence(net)

    def proof(self, name: str) -> Proof:
        notes = self._observer.notes
        if not notes:
            raise ValueError(f"no step of {name} could be looked at: gradients were never finite")
        found = verdicts(notes, self._divergence, self._remembers, self._by_rows)
        return Proof(recipe=name, notes=notes, verdicts=found)


def leaves_no_row_out(recipe: Any) -> bool:
    """Whether all it selects is selected row by row: all-dimension top-k, in every step."""
    if any(isinstance(part, InBasis) for part in parts(recipe)):  # rows of something else
        return False
    views = [part.over for part in parts(recipe) if isinstance(part, Select)]
    return bool(views) and all(view is by_row for view in views)


def divergence(net: nn.Module) -> float:
    """The largest difference between any two ranks' parameters."""
    most = 0.0
    for p in net.parameters():
        low, high = p.detach().clone(), p.detach().clone()
        dist.all_reduce(low, op=dist.ReduceOp.MIN)
        dist.all_reduce(high, op=dist.ReduceOp.MAX)
        most = max(most, float((high - low).max()) if p.numel() else 0.0)
        broken = (~p.detach().isfinite()).float().sum()
        dist.all_reduce(broken)
        if broken > 0:
            return float("inf")
    return most


def as_rows(proof: Proof) -> list[list[str]]:
    """The verdicts as text, with a header."""
    rows = [["what", "measured", "limit", "margin", "verdict", "where"]]
    for v in proof.verdicts:
        verdict = "told" if v.held is None else "held" if v.held else "violated"
        numbers = [_number(v.value), _number(v.limit), _number(v.margin)]
        rows.append([v.what, *numbers, verdict, v.where])
    return rows


def _number(value: Any) -> str:
    return "" if value != value else f"{value:.3g}"
