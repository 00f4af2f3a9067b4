"""Runs on workers: one folder a run, skipped if it is done, resumed if it was begun.

DIR/config.toml log.jsonl tensorboard/ checkpoints/ result.json
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist

from thinwire.jobs import config, launch, logs, loop, saved
from thinwire.jobs.config import Run
from thinwire.jobs.launch import Place
from thinwire.jobs.loop import Outcome
from thinwire.lab import workers
from thinwire.lab.workers import Refused

EVERY = 0.1  # seconds between reports of a step
Report = Callable[[Any], None]
Placed = Sequence[tuple[Run, Path | None]]  # runs, and the folders of those that are kept


def local(world: int, runs: Placed, resume: bool, net: str, on_report: Report) -> list[Outcome]:
    """On local workers, one run after the other; those already done are read."""
    stop = workers.event()
    outcomes: list[Outcome] = workers.run(
        world, _worker, list(runs), resume, stop, on_report=on_report, net=net, stop=stop
    )[0]
    return outcomes


def launched(
    runs: Sequence[tuple[Run, Path | None]], resume: bool, report: Report
) -> list[Outcome]:
    """In the group that a launcher has started this process in; signals end it after a step."""
    asked: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda n, frame: asked.append(n))
    place = launch.join()
    try:
        said = report if place.rank == 0 else lambda message: None
        return _all(place, runs, resume, said, lambda: bool(asked))
    finally:
        dist.destroy_process_group()


def prepared(run: Run, out: Path, resume: bool) -> None:
    """The run's folder, with its configuration; an earlier run is not overwritten by accident."""
    logs.prepared(out)
    begun = saved.steps(out) or (out / logs.LOG).exists()
    if begun and not resume:
        raise Refused(f"{out} holds a run already; give --resume {out} to go on, or another --out")
    logs.written(out / logs.CONFIG, config.written(run))


def result(out: Path) -> Outcome | None:
    """What a finished run gave."""
    path = out / logs.RESULT
    if not path.is_file():
        return None
    try:
        return Outcome(**json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise Refused(f"{path} is damaged ({error}); remove it to run again") from None


def _worker(
    rank: int,
    world: int,
    report: Report,
    runs: list[tuple[Run, Path | None]],
    resume: bool,
    stop: Any,
) -> list[Outcome]:
    return _all(Place(rank=rank, world=world), runs, resume, report, stop.is_set)


def _all(
    place: Place, runs: Placed, resume: bool, report: Report,
    asked: Callable[[], bool],
) -> list[Outcome]:  # fmt: skip
    outcomes = []
    for number, (run, out) in enumerate(runs):
        done = result(out) if out is not None else None
        if done is None:
            done = _one(place, run, out, resume, lambda r, n=number: report((n, r)), asked)  # type: ignore[misc]
        outcomes.append(done)
        if not done.finished:
            break
    return outcomes


def _one(
    place: Place, run: Run, out: Path | None, resume: bool, report: Report,
    asked: Callable[[], bool],
) -> Outcome:  # fmt: skip
    begun = resume and out is not None and bool(saved.steps(out))
    after = saved.steps(out)[-1] if begun and out is not None else 0
    log = logs.Log(out, after) if out is not None and place.rank == 0 else None
    last = 0.0

    def tell(record: dict[str, Any]) -> None:
        nonlocal last
        if place.rank:
            return
        if log is not None:
            log.add(record)
        if "seconds" not in record or time.monotonic() - last > EVERY:
            last = time.monotonic()
            report(record)

    outcome = loop.train(place, run, out=out, resume=begun, tell=tell, asked_to_stop=asked)
    if log is not None and out is not None:
        log.close()
        if outcome.finished:
            logs.written(out / logs.RESULT, json.dumps(asdict(outcome), indent=2) + "\n")
    return outcome
