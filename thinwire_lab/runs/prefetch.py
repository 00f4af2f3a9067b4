"""A training's data and the batches to come: what one rank cannot read ends all alike."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch

from thinwire_lab.errors import Refused
from thinwire_lab.jobs.catalogue import find
from thinwire_lab.jobs.data.source import Batch, Data, Shards, batches
from thinwire_lab.jobs.job import Settings, Task
from thinwire_lab.runs.config import Run
from thinwire_lab.runs.launch import Worker, agree, gather, refuse_together

Report = Callable[[dict[str, Any]], None]


class Prefetch:
    """The batches of the next two steps, and what this rank was refused: data, a place to write.

    The wish to stop takes a step to arrive, so a batch must be known to be there two steps early.
    """

    def __init__(self, steps: Iterator[list[Batch]], left: int, report: Report) -> None:
        self._report, self.problem = report, ""
        self._steps, self._left, self._ready = steps, left, deque[list[Batch]]()
        self._fetch(2)
        refuse_together(self.problem)  # what cannot even begin

    def next(self) -> list[Batch]:
        ready = self._ready.popleft()
        self._fetch(1)
        return ready

    def report(self, records: list[dict[str, Any]]) -> None:
        try:
            for record in records if not self.problem else ():
                self._report(record)
        except Refused as error:
            self.problem = str(error)

    def _fetch(self, count: int) -> None:
        try:
            for _ in range(min(count, self._left) if not self.problem else 0):
                self._ready.append(next(self._steps))
                self._left -= 1
        except Refused as error:
            self.problem = str(error)


def read_steps(data: Data, settings: Settings, worker: Worker, step: int) -> Iterator[list[Batch]]:
    """This rank's batches of every step from this one on."""
    first = step * settings.accumulate
    shards = Shards(len(data), settings.batch, worker.rank, worker.world, settings.seed, first)
    stream = batches(data, shards, settings.loaders)
    while True:
        yield [next(stream) for _ in range(settings.accumulate)]


def load_task(run: Run) -> Task:
    """The task, if all ranks have it and have read the same; on several machines they may not."""
    task, mine = agree(lambda: _load(run))
    if any(theirs != mine for theirs in gather(mine)):
        raise Refused("workers have read different data; give all of them the same files")
    return task


def _load(run: Run) -> tuple[Task, list[float]]:
    """A task, and figures that tell its data from other data."""
    task = find(run.job).make(run.size, run.source())
    for name, data in (("test", task.test), ("validation", task.valid)):
        if data is not None and len(data) == 0:
            raise Refused(f"the {name} data is shorter than one example; give more of it")
    batch = task.test.batch(torch.arange(min(8, len(task.test))), None)
    lengths = [len(data) for data in (task.train, task.test, task.valid) if data is not None]
    return task, [*lengths, *(float(column.double().sum()) for column in batch[:5])]
