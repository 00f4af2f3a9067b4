"""Makes `thinwire/evidence.json` of recorded trainings: python -m thinwire_lab.runs.evidence."""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from thinwire import evidence, recipes
from thinwire.evidence import Trial
from thinwire_lab.runs import ledger
from thinwire_lab.runs.ledger import Line

RESULTS = Path(__file__).parents[2] / "docs" / "results"
DENSE = ("dense()", "ddp")
SIZE = "small"  # tiny trainings say nothing of accuracy


def collect(lines: Iterable[Line]) -> list[Trial]:
    """One trial per job, optimizer, number of steps and recipe, by name."""
    places: dict[str, list[Line]] = {}
    for line in lines:
        if line.size == SIZE:
            places.setdefault(_place(line), []).append(line)
    found: dict[tuple[str, str, int, str], tuple[float, Trial]] = {}
    for alike in places.values():
        dense = [line for line in alike if line.outcome.recipe in DENSE]
        calls = dict.fromkeys(line.outcome.recipe for line in alike if _known(line.outcome.recipe))
        for call in calls if dense else ():
            trial = _trial([line for line in alike if line.outcome.recipe == call], dense)
            key = (trial.job, trial.optimizer, trial.steps, trial.recipe)
            badness = _badness(dense)  # of two learning rates, the one that suits dense counts
            if key not in found or badness < found[key][0]:
                found[key] = badness, trial
    return [trial for _, (_, trial) in sorted(found.items())]


def _place(line: Line) -> str:
    """What a training shares with the dense one it is held against; links change no figure."""
    steps = line.outcome.steps
    data = (line.data, line.origin, line.checkpoint)
    return json.dumps([line.job, line.workers, steps, data, line.settings], sort_keys=True)


def _known(call: str) -> bool:
    """Whether it is a recipe, and not a baseline, nor `auto`, of which it is not known what ran."""
    if call.startswith("auto("):
        return False
    try:
        recipes.parse(call)
    except ValueError:
        return False
    return True


def _trial(lines: Sequence[Line], dense: Sequence[Line]) -> Trial:
    last = {line.seed: line for line in lines}  # a seed that ran on two networks counts once
    one, metrics = lines[0], [line.outcome.metrics for line in last.values()]
    sent, whole = (sum(m[key] for m in metrics) for key in ("bytes_sent", "bytes_dense"))
    cost = _badness(list(last.values())) - _badness(dense)
    if "perplexity" in one.outcome.figures:
        cost *= 100 / _badness(dense)
    return Trial(
        recipe=one.outcome.recipe, job=one.job, optimizer=one.settings["optimizer"],
        clipped=one.settings["clip"] > 0, workers=one.workers, steps=one.outcome.steps,
        seeds=len(last), saving=round(whole / sent, 2),
        cost=round(cost, 2) if math.isfinite(cost) else math.inf,
    )  # fmt: skip


def _badness(lines: Sequence[Line]) -> float:
    """Lower is better: perplexity, or points of accuracy below none."""
    figures = {line.seed: line.outcome.figures for line in lines}.values()
    return statistics.mean(
        one["perplexity"] if "perplexity" in one else -100 * one["accuracy"] for one in figures
    )


def write(path: Path = evidence.FILE) -> int:
    """Write the file; how many trials it holds."""
    found = collect(ledger.read(sorted(RESULTS.glob("*.jsonl"))))
    rows = ",\n".join(json.dumps(asdict(trial)) for trial in found)
    path.write_text(f"[\n{rows}\n]\n", encoding="utf-8")
    return len(found)


if __name__ == "__main__":
    sys.stdout.write(f"{evidence.FILE.name}: {write()} trials\n")
