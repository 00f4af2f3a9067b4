"""A training's data and the batches to come: what one rank cannot read ends all alike."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from thinwire.jobs.catalogue import find
from thinwire.jobs.config import Run
from thinwire.jobs.data.source import Batch, Data, Shards, batches
from thinwire.jobs.job import Settings, Task
from thinwire.jobs.launch import Place, agreed
from thinwire.lab.workers import Refused

Tell = Callable[[dict[str, Any]], None]


class Ahead:
    """The batches of the next two steps, and what this rank was refused: data, a place to write.

    The wish to stop takes a step to arrive, so a batch must be known to be there two steps early.
    """

    def __init__(self, parts: Iterator[list[Batch]], left: int, tell: Tell) -> None:
        self._tell, self._problem = tell, ""
        self._parts, self._left, self._ready = parts, left, deque[list[Batch]]()
        self._fetch(2)
        agreed(self.complain)  # what cannot even begin

    @property
    def refused(self) -> bool:
        return bool(self._problem)

    def next(self) -> list[Batch]:
        part = self._ready.popleft()
        self._fetch(1)
        return part

    def tell(self, records: list[dict[str, Any]]) -> None:
        try:
            for record in records if not self._problem else ():
                self._tell(record)
        except Refused as error:
            self._problem = str(error)

    def complain(self) -> None:
        if self._problem:
            raise Refused(self._problem)

    def _fetch(self, count: int) -> None:
        try:
            for _ in range(min(count, self._left) if not self._problem else 0):
                self._ready.append(next(self._parts))
                self._left -= 1
        except Refused as error:
            self._problem = str(error)


def parts(data: Data, settings: Settings, place: Place, step: int) -> Iterator[list[Batch]]:
    """This rank's batches of every step from this one on."""
    first = step * settings.accumulate
    shards = Shards(len(data), settings.batch, place.rank, place.world, settings.seed, first)
    stream = batches(data, shards, settings.loaders)
    while True:
        yield [next(stream) for _ in range(settings.accumulate)]


def same_data(run: Run, world: int) -> Task:
    """The task, if all ranks have it and have read the same; on several machines they may not."""
    made: list[Task] = []
    mine: list[float] = []

    def look() -> None:
        task = find(run.job).make(run.size, run.source())
        heard = 1 if task.valid is None else len(task.valid)
        if len(task.test) == 0 or heard == 0:
            raise Refused(
                f"the {'test' if heard else 'validation'} data is shorter than one example; give "
                "more of it"
            )
        batch = task.test.batch(torch.arange(min(8, len(task.test))), None)
        sums = (float(column.double().sum()) for column in batch[:5])
        mine.extend([len(task.train), len(task.test), heard, *sums])
        made.append(task)

    agreed(look)
    (task,) = made
    sums = torch.tensor(mine, dtype=torch.float64)
    every = [torch.empty_like(sums) for _ in range(world)]
    dist.all_gather(every, sums)
    if any(not torch.equal(theirs, every[0]) for theirs in every):
        raise Refused("workers have read different data; give all of them the same files")
    return task
