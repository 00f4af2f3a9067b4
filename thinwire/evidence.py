"""What recipes cost in accuracy: every recorded training beside the dense one of the same settings.

`evidence.json` is made from the recorded results by the laboratory (`thinwire_lab.runs.evidence`).
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FILE = Path(__file__).with_suffix(".json")
FAMILIES = {"adamw": "adam"}  # optimizers that count as another one
# The arguments of a schedule that are numbers of steps, by position and by name.
LENGTHS: dict[str, tuple[int | None, str]] = {
    "Ramp": (None, "steps"), "Flushed": (1, "steps"), "Piecewise": (0, "until"),
    "stages": (1, "every"), "dgc_ramp": (2, "every"), "tuned": (1, "steps"),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A recipe in one kind of training, the mean of its seeds.

    `saving` is how many times fewer bytes were sent than dense sends. `cost` is in percent, above 0
    is worse: points of accuracy lost, or how much higher the perplexity was.
    """

    recipe: str
    job: str
    optimizer: str
    clipped: bool
    workers: int
    steps: int
    seeds: int
    saving: float
    cost: float


@cache
def trials() -> tuple[Trial, ...]:
    """All recorded trials.

    >>> max(trial.saving for trial in trials() if trial.cost <= 1) > 10
    True
    """
    return tuple(Trial(**row) for row in json.loads(FILE.read_text(encoding="utf-8")))


def find(recipe: str, optimizer: str | None = None) -> tuple[Trial, ...]:
    """The trials of a recipe, whatever the length of its schedules.

    Calls are alike if their arguments are written alike, in any order, with any number of steps
    inside a schedule. An argument that is left out is not looked up: unknown is the safe answer.

    Args:
        recipe: the call as on the command line.
        optimizer: "sgd" or "adam" (AdamW counts as Adam); all of them without it.

    >>> {trial.job for trial in find("int8()")} >= {"resnet20", "lstm-lm", "gpt2"}
    True
    """
    wanted = _shape(recipe)
    return tuple(
        trial
        for trial in trials()
        if _shape(trial.recipe) == wanted and optimizer in (None, family(trial.optimizer))
    )


def worst(found: Iterable[Trial]) -> Trial | None:
    """The trial with the highest cost, or none of none.

    >>> worst(()) is None
    True
    """
    return max(found, key=lambda trial: trial.cost, default=None)


def family(optimizer: str) -> str:
    """The optimizers that react alike to a recipe have one name.

    >>> family("adamw")
    'adam'
    """
    return FAMILIES.get(optimizer, optimizer)


@cache
def _shape(call: str) -> str:
    """The call without numbers of steps, its arguments in one order."""
    try:
        tree = ast.parse(call.strip(), mode="eval").body
    except (SyntaxError, ValueError):
        return call
    tree = ast.Call(func=tree, args=[], keywords=[]) if isinstance(tree, ast.Name) else tree
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            place, name = LENGTHS.get(ast.unparse(node.func), (None, ""))
            node.args = [arg for number, arg in enumerate(node.args) if number != place]
            named = [pair for pair in node.keywords if pair.arg != name]
            node.keywords = sorted(named, key=lambda pair: str(pair.arg))
    return ast.unparse(tree)
