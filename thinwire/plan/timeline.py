"""One training step, replayed: backward and the lane share the processor, the lane has the network.

    main     forward | backward of bucket 1 | of bucket 2 | ...   (waits for the lane) | optimizer
    lane               select 1 | exchange 1 | write 1 | select 2 | ...
    network                     [   wire   ]

Processor time is a fluid: whoever can use a core gets one, or its part of what there is (`cores`
per worker; 0.5 with four workers on two cores). An exchange ends when its bytes have crossed the
wire and the processor has done its part of it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, kw_only=True)
class Work:
    """One bucket, in the order of backward; all but `wire` are seconds of one core.

    `backward` is from the bucket before it until its last gradient is there; `effort` what the
    processor does for the exchange itself.
    """

    name: str = ""
    backward: float
    select: float = 0.0
    wire: float = 0.0
    effort: float = 0.0
    scatter: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Span:
    """What `where` (main, lane or network) did for a bucket, and when."""

    where: str
    what: str
    bucket: str
    begin: float
    end: float


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """A step: its length, how long backward's end waited, and how long the network had nothing to
    do between its first byte and its last."""

    step: float
    exposed: float
    idle: float
    spans: tuple[Span, ...] = ()


@dataclass
class _Task:
    """Something under way: seconds of processor and of wire that are left."""

    where: str
    what: str
    bucket: str
    cpu: float
    wire: float = 0.0
    begin: float = math.nan

    @property
    def done(self) -> bool:
        return self.cpu <= 0 and self.wire <= 0

    def span(self, now: float) -> Span:
        begin = now if math.isnan(self.begin) else self.begin
        return Span(where=self.where, what=self.what, bucket=self.bucket, begin=begin, end=now)


def replay(
    works: Sequence[Work], *, forward: float = 0.0, optimizer: float = 0.0, cores: float = math.inf
) -> Timeline:
    """One step of these buckets."""
    if not cores > 0:
        raise ValueError(f"cores per worker must be above 0, got {cores}")
    main = deque([_Task("main", "forward", "", forward)])
    main.extend(_Task("main", "backward", work.name, work.backward) for work in works)
    lane: deque[_Task] = deque()
    spans: list[Span] = []
    coming = iter(works)
    now = waiting = 0.0
    while main or lane:
        for queue in (main, lane):
            while queue and queue[0].done:
                task = queue.popleft()
                spans.append(task.span(now))
                if task.what == "backward":
                    lane.extend(_exchange(next(coming)))
                waiting = now if queue is main else waiting
        now += _advance([queue[0] for queue in (main, lane) if queue], now, cores)
    step = now + optimizer / min(1.0, cores)
    spans.append(Span(where="main", what="optimizer", bucket="", begin=now, end=step))
    return Timeline(step=step, exposed=now - waiting, idle=_idle(spans), spans=tuple(spans))


def _exchange(work: Work) -> list[_Task]:
    return [
        _Task("lane", "select", work.name, work.select),
        _Task("network", "exchange", work.name, work.effort, work.wire),
        _Task("lane", "write", work.name, work.scatter),
    ]


def _advance(tasks: list[_Task], now: float, cores: float) -> float:
    """Until the first of them has its processor part or its wire part done: how long that takes."""
    busy = [task for task in tasks if task.cpu > 0]
    rate = min(1.0, cores / len(busy)) if busy else 1.0
    ends = [task.cpu / rate for task in busy] + [task.wire for task in tasks if task.wire > 0]
    step = min(ends, default=0.0)
    for task in tasks:
        task.begin = now if math.isnan(task.begin) else task.begin
        task.cpu = _less(task.cpu, step * rate)
        task.wire = _less(task.wire, step)
    return step


def _less(left: float, done: float) -> float:
    """Nothing is left of what rounding has left."""
    return left - done if left - done > 1e-12 else 0.0


def _idle(spans: list[Span]) -> float:
    sends = [span for span in spans if span.where == "network" and span.end > span.begin]
    return sum(max(0.0, b.begin - a.end) for a, b in pairwise(sends))
