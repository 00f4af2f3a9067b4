"""Every job at tiny size with three recipes, in one set of processes: the loss falls."""

from __future__ import annotations

import time

import pytest

from thinwire_lab.jobs.catalogue import JOBS
from thinwire_lab.jobs.job import Source
from thinwire_lab.local import workers
from thinwire_lab.runs import config, loop
from thinwire_lab.runs.launch import Worker

pytest.importorskip("transformers", reason="transformers is not installed")

RECIPES = ("dense()", "adtopk(density=0.05)", "acpsgd(rank=2)")
LARGE = {
    "bert-large": "bert",
    "squad-large": "squad",
    "gpt2-large": "gpt2",
    "lstm-wiki": "lstm-lm",
}  # at tiny size they are the same job
SMALL = [job for job in JOBS if job not in LARGE]
LONGEST = 8.0  # seconds of one training, data and all: of this process, whoever else is at work


def train_all(rank, world, report):
    found = {}
    for job in SMALL:
        for recipe in RECIPES:
            begin = time.process_time()
            run = config.make_run({"job": job, "size": "tiny", "recipe": recipe})
            outcome = loop.train(Worker(rank=rank, world=world), run)
            found[job, recipe] = outcome, time.process_time() - begin
    return found


@pytest.mark.slow
def test_every_job_trains_and_its_loss_falls():
    found = workers.run(2, train_all)[0]
    assert set(found) == {(job, recipe) for job in SMALL for recipe in RECIPES}
    failed = {
        key: (outcome.first_loss, outcome.loss)
        for key, (outcome, _) in found.items()
        if not (outcome.finished and outcome.figures and outcome.loss < 0.97 * outcome.first_loss)
    }
    assert not failed
    slow = {key: seconds for key, (_, seconds) in found.items() if seconds > LONGEST}
    assert not slow


def test_large_jobs_are_the_base_ones_at_tiny_size():
    for large, base in LARGE.items():
        assert JOBS[large].sizes["tiny"] == JOBS[base].sizes["tiny"]
        tasks = [JOBS[name].make("tiny", Source()) for name in (large, base)]
        first, second = (sum(p.numel() for p in task.net().parameters()) for task in tasks)
        assert first == second and len(tasks[0].train) == len(tasks[1].train)
