"""Runs that were never run, for pages and tables."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from thinwire_lab.report.comparison import Entry
from thinwire_lab.runs import config
from thinwire_lab.runs.loop import Outcome


@pytest.fixture
def entry() -> Callable[[str, float], Entry]:
    """A run of this recipe, whose loss falls so fast."""
    return _entry


def _entry(recipe: str, slope: float) -> Entry:
    run = config.make_run({"job": "mlp", "size": "tiny", "recipe": recipe})
    steps = range(1, 61)
    records = [{"step": s, "loss": 2 / (1 + slope * s), "bytes_sent": 1000 * s * slope,
                "elapsed": 0.01 * s} for s in steps]  # fmt: skip
    records += [{**r, "accuracy": 1 - r["loss"] / 3} for r in records[::10]]
    seconds = {"seconds_select": 0.1, "seconds_exchange": 0.3, "seconds_scatter": 0.05,
               "seconds_exposed": 0.2}  # fmt: skip
    metrics = {"steps": 60, "bytes_sent": 60_000, "bytes_dense": 600_000, "messages": 360,
               "density": 0.05, "skipped_steps": 0, **seconds}  # fmt: skip
    outcome = Outcome(recipe=recipe, figures={"accuracy": 0.9}, loss=0.1, first_loss=2.0, steps=60,
                      seconds=0.6, step_seconds=0.01, metrics=metrics, finished=True)  # fmt: skip
    return Entry(run=run, outcome=outcome, records=records)
