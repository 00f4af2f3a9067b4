"""Small trainings whose scores are compared with their recorded lines, to the digit.

They hold everything together: data and shuffles, weights at the start, gradients, recipe, memory,
optimizer, schedule and score. Whoever changes what a training does changes a line, on purpose:

    python -m tests.lab.runs.test_recorded > tests/lab/runs/recorded.jsonl

Recorded with torch 2.13.0 on an Intel Xeon with AVX-512. Sums are ordered otherwise on other CPUs:
with AVX2 alone and with neither the share that is right was the same, and the losses to the digits
that are recorded. Threads are the pool's, one for each worker, whatever the environment says.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.processes import once
from thinwire_lab.runs import config, loop
from thinwire_lab.runs.launch import Worker

RECORDED = Path(__file__).with_name("recorded.jsonl")
RECIPES = ("dense()", "topk(density=0.05)", "adtopk(density=0.05)", "acpsgd(rank=2)")
STEPS, DIGITS = 24, 3


def train_each(rank, world):
    """The lines of all recipes."""
    lines = []
    for recipe in RECIPES:
        run = config.make_run({"job": "mlp", "recipe": recipe, "settings": {"steps": STEPS}})
        outcome = loop.train(Worker(rank=rank, world=world), run)
        lines.append({
            "recipe": recipe, "steps": outcome.steps,
            "accuracy": round(outcome.figures["accuracy"], 4),
            "test_loss": round(outcome.figures["test_loss"], DIGITS),
            "loss": round(outcome.loss, DIGITS),
            "bytes_sent": outcome.metrics["bytes_sent"],
        })  # fmt: skip
    return lines


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_trainings_end_as_recorded(pool):
    recorded = [json.loads(line) for line in RECORDED.read_text().splitlines()]
    assert pool.run(2, train_each, timeout=280)[0] == recorded  # 2 s, where nothing else runs


if __name__ == "__main__":
    for line in once(2, train_each)[0]:
        sys.stdout.write(json.dumps(line) + "\n")
