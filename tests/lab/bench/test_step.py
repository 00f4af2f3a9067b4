"""A step beside its references: every contender has a row, and one at a time is in memory."""

from __future__ import annotations

import gc
from typing import Any

import pytest
from torch.nn.parallel import DistributedDataParallel

from tests.processes import Pool
from thinwire_lab.bench import step
from thinwire_lab.runs.baselines import BASELINES

CALLS = ["topk(density=0.01)", "powersgd(rank=2)", "dense()"]


def counted(rank: int, world: int) -> tuple[list[str], list[int]]:
    models: list[int] = []

    def report(message: Any) -> None:
        models.append(sum(type(o) is DistributedDataParallel for o in gc.get_objects()))

    rows = step._worker(rank, world, report, CALLS, step.Trial(model="conv", batch=1, rounds=1))
    return [row.name for row in rows], models


@pytest.mark.slow
def test_one_contender_at_a_time_is_in_memory(pool: Pool) -> None:
    (names, models), _ = pool.run(2, counted)
    assert names == [*BASELINES, *CALLS]
    assert models == [1] * len(names)
