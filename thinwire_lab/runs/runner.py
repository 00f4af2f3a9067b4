"""Runs on workers: one folder per run, skipped if it is done, resumed if it was begun.

    DIR/config.toml log.jsonl tensorboard/ checkpoints/ result.json

Rank 0 looks at the folders and tells the others what it found: their disks may be behind.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from thinwire_lab import files
from thinwire_lab.errors import Refused
from thinwire_lab.jobs.catalogue import find
from thinwire_lab.jobs.job import DEFAULTS, FAKE, Task
from thinwire_lab.local import workers
from thinwire_lab.runs import checkpoint, config, launch, ledger, logs, loop
from thinwire_lab.runs.config import Run
from thinwire_lab.runs.launch import Worker, agree_on_first
from thinwire_lab.runs.ledger import Line
from thinwire_lab.runs.loop import Outcome

EVERY = 0.1  # seconds between reports of a step
LONGEST = 100  # letters of a recipe in a folder's name
LENGTHS = {"epochs", "steps", "score_every", "save_every", "loaders"}  # may change on a resume
AFRESH = ("powersgd-hook",)  # keeps a state that we cannot save
Report = Callable[[Any], None]
Placed = Sequence[tuple[Run, Path | None]]  # runs, and the folders of those that are kept


def run_local(
    runs: Placed, on_report: Report, book: Path | None = None,
    on_stop: Callable[[], None] = lambda: None,
) -> list[Outcome]:  # fmt: skip
    """Run on local workers, as many as all runs have; those already done are read.

    Each that ends becomes a line of the book.
    """
    stop, (run, _) = workers.make_event(), runs[0]
    with _claim_folders(runs):
        return workers.run(
            run.workers or 1, _work, list(runs), stop, book, on_report=on_report, net=run.net,
            stop=stop, on_stop=on_stop,
        )[0]  # fmt: skip


def _work(
    rank: int, world: int, report: Report, runs: Placed, stop: Any, book: Path | None
) -> list[Outcome]:
    worker, net = Worker(rank=rank, world=world), runs[0][0].net
    return _run_all(worker, runs, report, stop.is_set, net, book)


def run_launched(
    runs: Placed, prepare: Callable[[], None], report: Report, book: Path | None = None
) -> list[Outcome]:
    """Run in the group that a launcher has started this process in; signals end it after a step."""
    asked: list[int] = []

    def ask(number: int, frame: Any) -> None:
        if asked:
            return
        asked.append(number)
        time.sleep(workers.ECHO)  # one that comes twice at once is one
        signal.signal(number, signal.SIG_DFL)  # who asks twice does not want to wait

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, ask)
    worker = launch.join()
    claims = ExitStack()

    def begin() -> None:
        prepare()
        claims.enter_context(_claim_folders(runs))

    try:
        agree_on_first(begin)
        return _run_all(worker, runs, report, lambda: bool(asked), "launcher", book)
    except Refused:
        raise
    except ValueError as error:  # no refusal, which all ranks agree on: show where it comes from
        raise RuntimeError(f"worker {worker.rank} failed") from error
    finally:
        claims.close()
        launch.leave()


@contextmanager
def _claim_folders(runs: Placed) -> Iterator[None]:
    """The folders of all runs, for us alone."""
    with ExitStack() as claims:
        for _, out in runs:
            if out is not None:
                claims.enter_context(logs.claim(out))
        yield


def name_folder(run: Run) -> str:
    """A name that a file system takes; two runs that differ in anything have different ones.

    What is as it is by default has no part in it: a setting that comes later changes no name.
    """
    call = re.sub(r"[^A-Za-z0-9.=-]+", "_", run.recipe).strip("_")[:LONGEST]
    everything = asdict(run)
    own = {k: v for k, v in everything["settings"].items() if v != DEFAULTS.get(k)}
    text = json.dumps(everything | {"settings": own}, sort_keys=True)
    whole = hashlib.sha256(text.encode()).hexdigest()[:8]
    place = f"{run.job}-{run.size}-{run.workers}x{run.net}"
    return f"{place}-{call}-seed{run.settings.seed}-{whole}"


def check_folder(run: Run, out: Path, resume: bool) -> None:
    """Refuse a folder that the run cannot have; an earlier run is not overwritten by accident."""
    logs.check_writable(out)
    begun = checkpoint.list_steps(out) or (out / logs.LOG).exists()
    for read in (run.data, run.checkpoint):
        inside = read not in (None, FAKE) and _is_below(out, Path(str(read)))
        if inside and not begun:
            raise Refused(f"{out} is inside {read}, whose files are read; give another --out")
    if begun and not resume:
        raise Refused(f"{out} holds a run already; give --resume {out} to go on, or another --out")
    strange = [name for name in logs.OWN if (out / name).exists()]
    if strange and not resume:
        raise Refused(f"{out} holds {strange[0]}, which a run would replace; give another --out")
    changed = _find_changes(run, out) if begun else set()
    # the rate of a plateau depends on when it is scored
    free = LENGTHS - {"score_every"} if run.settings.schedule == "plateau" else LENGTHS
    if changed - free:
        names = ", ".join(sorted(changed - free))
        raise Refused(
            f"{out} holds a run with other settings ({names}); go on with those it has, or begin a "
            "run with another --out and no --resume"
        )


def _is_below(path: Path, folder: Path) -> bool:
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


def _find_changes(run: Run, out: Path) -> set[str]:
    """Names of what is not the same in this run and in the one that the folder holds."""
    there = _flatten(config.make_run(config.read_toml(out / logs.CONFIG)))
    return {name for name, value in _flatten(run).items() if value != there[name]}


def _flatten(run: Run) -> dict[str, Any]:
    """All of a run, its settings too, in one table; of its data the name: files may have moved."""
    table = asdict(replace(run, data=run.data and Path(run.data).name))
    settings: dict[str, Any] = table.pop("settings")
    return table | settings


def read_result(out: Path) -> Outcome | None:
    """What a finished run gave."""
    path = out / logs.RESULT
    if not path.is_file():
        return None
    try:
        return Outcome(**files.null_to_nan(json.loads(path.read_text(encoding="utf-8"))))
    except (OSError, ValueError, TypeError) as error:
        raise Refused(f"{path} is damaged ({error}); remove it to run again") from None


def _run_all(
    worker: Worker, runs: Placed, report: Report, asked: Callable[[], bool], net: str,
    book: Path | None,
) -> list[Outcome]:  # fmt: skip
    """Outcomes of this rank, and of runs that were done before."""
    outcomes: list[Outcome] = []
    agree_on_first(partial(_look_ahead, runs, worker.world))
    for number, (run, out) in enumerate(runs):
        done, begun = agree_on_first(partial(_look_back, run, out, worker.world, net, book))
        if done is not None:
            outcomes.append(done)
            continue
        outcome = _train(worker, run, out, begun, number_reports(report, number), asked)
        outcomes.append(outcome)
        if not outcome.finished:
            break
        if out is not None:
            agree_on_first(partial(_keep, run, out, outcome, worker.world, net, book))
    return outcomes


def _look_ahead(runs: Placed, world: int) -> None:
    """Refuse later runs whose data or recipe will not do, before hours are spent."""
    waiting = [run for run, out in runs if out is None or read_result(out) is None]
    made: dict[str, tuple[Task, nn.Module]] = {}
    for run in waiting[1:]:
        if run.job not in made:
            task = find(run.job).make(run.size, run.source())
            with torch.device("meta" if run.checkpoint is None else "cpu"):
                made[run.job] = task, task.net()
        task, net = made[run.job]
        _, total = loop.count_steps(task, run.settings, world)
        loop.check_recipe(run.reducer(), net, world, total)


def _look_back(
    run: Run, out: Path | None, world: int, net: str, book: Path | None
) -> tuple[Outcome | None, bool]:
    """What the run gave, if it was done before; and if not, whether it was begun."""
    if out is None:
        return None, False
    done = read_result(out)
    if done is not None and not _find_changes(run, out) & {"epochs", "steps"}:
        if book is not None:  # which may have missed it
            ledger.complete(book, Line.of(run, world, net, done, out))
        return done, False
    if run.recipe in AFRESH:
        checkpoint.drop(out)
    return None, bool(checkpoint.list_steps(out))


def _keep(run: Run, out: Path, outcome: Outcome, world: int, net: str, book: Path | None) -> None:
    text = json.dumps(files.nan_to_null(asdict(outcome)), indent=2) + "\n"
    files.write(out / logs.RESULT, text)
    if book is not None:
        ledger.append(book, Line.of(run, world, net, outcome, out))


def number_reports(report: Report, number: int) -> Report:
    """Reports of one of several runs, with its place among them."""
    return lambda record: report((number, record))


def _train(
    worker: Worker, run: Run, out: Path | None, resume: bool, report: Report,
    asked: Callable[[], bool],
) -> Outcome:  # fmt: skip
    log: logs.Log | None = None
    last = 0.0

    def write_record(record: dict[str, Any]) -> None:
        nonlocal last, log
        if worker.rank:
            return
        if log is None and out is not None:  # now that there is something to write
            # a result that is there is of the shorter run that this one continues
            (out / logs.RESULT).unlink(missing_ok=True)
            files.write(out / logs.CONFIG, config.to_toml(run))
            log = logs.Log(out, checkpoint.list_steps(out)[-1] if resume else 0)
            if not resume:
                log.add({"step": 0, "data": run.material})
        if log is not None:
            log.add(record)
        if "seconds" not in record or time.monotonic() - last > EVERY:
            last = time.monotonic()
            report(record)

    try:
        return loop.train(
            worker, run, out=out, resume=resume, report=write_record, asked_to_stop=asked
        )
    finally:
        if log is not None:
            log.close()
