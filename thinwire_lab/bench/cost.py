"""What a recipe costs a worker: processor and wall time of a step over the plain one, and where.

The unit is one `add_` over the model's gradient, taken in the same run: error feedback cannot cost
less. Gradients are those of a real model, with the zeros that dead units leave. Figures are medians
on rank 0, one contender in memory at a time.
"""

from __future__ import annotations

import cProfile
import gc
import pstats
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from thinwire import recipes
from thinwire.bucket import Bucket
from thinwire.engine.ddp import attach
from thinwire.engine.optimizer import distribute
from thinwire.protocols import Comm, Reduced, Reducer
from thinwire_lab.bench import models
from thinwire_lab.local import workers
from thinwire_lab.runs.baselines import IDLE, PLAIN, Baseline

ALONE = "plain step"
DISTRIBUTE = "distribute: "
# Where time goes, by the file or the function it is spent in; the first that fits.
PHASES = {
    "decode": ("_decode", "scaled", "unpack", "either", "decode_into", "decode_loops"),
    "code": ("_encode", "pack", "/wire/", "rice", "bits.py", "scales"),
    "fold": ("accumulate", "memory.py", "operand.py", "remember.py"),
    "mean": ("filled", "scatter_add", "merged", "payload.py"),
    "select": ("/kernels/", "selectors/", "bucket.py", "reducers.py", "frames/", "collectives/"),
    "exchange": ("/comm/",),
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One contender's figures, in seconds per step."""

    name: str
    unit: float  # processor time of one add_ over the gradient
    step: float  # processor time over the plain step
    wall: float  # wall time over the plain step
    reduce: float  # processor time in `reduce`, of all buckets
    phases: dict[str, float]  # the same by phase; what is left of the step is around it


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What is measured, and how often."""

    model: str = "mlp"
    batch: int = 16
    bucket_mb: float = 25.0
    turns: int = 15


class _Timed:
    """A recipe whose `reduce` is timed on the lane's thread; while `profiler` is set, profiled."""

    def __init__(self, inner: Reducer) -> None:
        self._inner, self.seconds = inner, 0.0
        self.profiler: cProfile.Profile | None = None

    def reduce(self, bucket: Bucket, comm: Comm) -> Reduced:
        begin = time.thread_time()
        if self.profiler is not None:
            self.profiler.enable()
        try:
            return self._inner.reduce(bucket, comm)
        finally:
            if self.profiler is not None:
                self.profiler.disable()
            self.seconds += time.thread_time() - begin

    def traffic(self, *args: Any) -> Any:
        return self._inner.traffic(*args)


def measure(
    calls: list[str], world: int, trial: Trial, on_report: Callable[[str], None] = lambda name: None
) -> list[Row]:
    """A row for the plain step, for DDP alone and for every recipe."""
    for call in calls:
        recipes.parse(call.removeprefix(DISTRIBUTE))
    models.maker(trial.model)
    return workers.run(world, _worker, calls, trial, on_report=on_report)[0]


def _worker(rank: int, world: int, report: Any, calls: list[str], trial: Trial) -> list[Row]:
    rows: list[Row] = []
    for name in (ALONE, IDLE, *calls):
        rows.append(_measure_one(name, trial, rows[0] if rows else None))
        gc.collect()  # DDP and its hook hold each other
        report(name) if rank == 0 else None
    return rows


def _measure_one(name: str, trial: Trial, plain: Row | None) -> Row:
    torch.manual_seed(0)
    net, inputs = models.make(trial.model, trial.batch)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    model: Any = net
    timed = None
    if name.startswith(DISTRIBUTE):
        sync = distribute(net, recipes.parse(name.removeprefix(DISTRIBUTE)), optimizer,
                          bucket_mb=trial.bucket_mb)  # fmt: skip
        timed = _time(sync)
    elif name != ALONE:
        model = Baseline(IDLE if name == IDLE else PLAIN, net, trial.bucket_mb).model
        if name != IDLE:
            timed = _time(attach(model, recipes.parse(name), optimizer))

    def step() -> tuple[float, float, float]:
        """Seconds of the processor, of the wall and in `reduce`."""
        before = timed.seconds if timed else 0.0
        dist.barrier()
        begin, busy = time.perf_counter(), time.process_time()
        models.loss_of(model(*inputs)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        spent = time.process_time() - busy, time.perf_counter() - begin
        return *spent, (timed.seconds if timed else 0.0) - before

    for _ in range(4):  # buckets are rebuilt after the first step
        step()
    cpu, wall, reduce = map(
        statistics.median, zip(*(step() for _ in range(trial.turns)), strict=True)
    )
    phases = _profile(timed, step, reduce) if timed else {}
    unit = _time_add(sum(p.numel() for p in net.parameters())) if plain is None else plain.unit
    return Row(
        name=name, unit=unit, step=cpu - (plain.step if plain else 0.0),
        wall=wall - (plain.wall if plain else 0.0), reduce=reduce, phases=phases,
    )  # fmt: skip


def _time(sync: Any) -> _Timed:
    """Put a clock around the recipe of a session."""
    steps = sync._intake.steps
    steps.recipe = timed = _Timed(steps.recipe)
    return timed


def _time_add(n: int) -> float:
    x, y = torch.zeros(n), torch.ones(n)
    taken = []
    for _ in range(9):
        dist.barrier()
        begin = time.thread_time()
        x.add_(y)
        taken.append(time.thread_time() - begin)
    return statistics.median(taken[2:])


def _profile(timed: _Timed, step: Callable[[], object], reduce: float) -> dict[str, float]:
    """Shares of three profiled steps, as parts of the time that `reduce` takes unprofiled."""
    timed.profiler = cProfile.Profile(time.thread_time)
    for _ in range(3):
        step()
    found: Counter[str] = Counter()
    stats: dict[Any, Any] = pstats.Stats(timed.profiler).stats  # type: ignore[attr-defined]
    for place, (_, _, own, _, callers) in stats.items():
        if place[0] == "~" and callers:  # built in: spent for whoever called it
            for caller, spent in callers.items():
                found[_find_phase(caller)] += spent[2]
        else:
            found[_find_phase(place)] += own
    total = sum(found.values()) or 1.0
    return {phase: reduce * found[phase] / total for phase in (*PHASES, "other")}


def _find_phase(place: tuple[str, int, str]) -> str:
    where = f"{Path(place[0]).as_posix()}:{place[2]}"
    for phase, marks in PHASES.items():
        if any(mark in where for mark in marks):
            return phase
    return "other"
