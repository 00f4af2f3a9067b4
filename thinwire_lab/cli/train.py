"""`thinwire train` and `thinwire compare`: real training with one recipe or several."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import TaskID

from thinwire_lab.cli import options
from thinwire_lab.cli.app import app, console, reported
from thinwire_lab.cli.display import lay_out, make_bars
from thinwire_lab.report import comparison, page
from thinwire_lab.runs import config, launch, ledger, logs, runner
from thinwire_lab.runs.config import Run
from thinwire_lab.runs.loop import Outcome


@app.command()
def train(
    job: Annotated[str, typer.Argument(help="Job to train; `thinwire list` names them.")],
    recipe: Annotated[str | None, typer.Option(help="Recipe, as a call.")] = None,
    workers: options.Workers = None,
    size: options.Size = None,
    net: options.Net = None,
    data: options.DataPath = None,
    checkpoint: options.Weights = None,
    out: Annotated[Path | None, typer.Option(help="Folder for logs and checkpoints.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Continue the run in this folder.")] = None,
    config_file: options.Config = None,
    epochs: options.Epochs = None,
    steps: options.Steps = None,
    batch: options.Batch = None,
    rate: options.Rate = None,
    seed: options.Seed = None,
    setting: options.Setting = None,
) -> None:
    """Train a job with a recipe, on local workers or under torchrun, srun or mpirun.

    Ctrl-C and SIGTERM finish the step, save a checkpoint and end.
    """
    with reported():
        with launch.share_refusals(config_file, resume):
            if resume is not None and out not in (None, resume):
                raise ValueError("--resume goes on in its own folder; give it without --out")
            base = config.read_toml(config_file) if config_file else {}
            if resume is not None:
                base = options.override(config.read_toml(resume / logs.CONFIG), base)
            asked = options.merge(
                base, setting, job=job, recipe=recipe, size=size, data=data, net=net,
                workers=workers, checkpoint=checkpoint, epochs=epochs, steps=steps, batch=batch,
                rate=rate, seed=seed,
            )  # fmt: skip
            folder = resume or out
            run, launched = find_workers(config.make_run(asked), workers, 2)
        if launch.is_first():
            print_runs([run])
        outcomes = _run([(run, folder)], launched, resume is not None)
    if not launch.is_first():
        return
    (outcome,) = outcomes
    _print([run], [outcome])
    examples = run.settings.batch * run.settings.accumulate * (run.workers or 1)
    console.print(f"{examples / outcome.step_seconds:.4g} examples a second", highlight=False)
    if not outcome.finished:
        where = f"; go on with --resume {folder}" if folder is not None else ""
        console.print(f"Stopped after step {outcome.steps}{where}.", highlight=False, markup=False)


@app.command()
def compare(
    job: Annotated[list[str], typer.Argument(help="One or more jobs.")],
    recipe: Annotated[
        list[str], typer.Option(help="Recipe call, or ddp, fp16-hook, powersgd-hook; repeatable.")
    ],
    workers: options.Workers = None,
    size: options.Size = None,
    net: options.Net = None,
    data: options.DataPath = None,
    checkpoint: options.Weights = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the runs and report.html.")] = None,
    config_file: options.Config = None,
    seeds: Annotated[
        str | None, typer.Option(help="Seeds, as 0,1,2; every recipe runs with each.")
    ] = None,
    epochs: options.Epochs = None,
    steps: options.Steps = None,
    batch: options.Batch = None,
    rate: options.Rate = None,
    setting: options.Setting = None,
) -> None:
    """Train with several recipes under the same seeds, and compare them in a table.

    With --out, finished runs are not repeated, interrupted ones continue, and a page is written.
    Finished runs are appended to results.jsonl, from which `thinwire results` makes tables.
    """
    with reported():
        runs: list[Run] = []
        with launch.share_refusals(config_file):
            base = config.read_toml(config_file) if config_file else {}
            for name, call in product(dict.fromkeys(job), dict.fromkeys(recipe)):
                asked = options.merge(
                    base, setting, job=name, recipe=call, size=size, data=data, net=net,
                    workers=workers, checkpoint=checkpoint, epochs=epochs, steps=steps,
                    batch=batch, rate=rate,
                )  # fmt: skip
                run, launched = find_workers(config.make_run(asked), workers, 4)
                for number in options.parse_seeds(seeds, run.settings.seed):
                    runs.append(replace(run, settings=replace(run.settings, seed=number)))
        placed = [(run, None if out is None else out / runner.name_folder(run)) for run in runs]
        book = None if out is None else out / ledger.NAME
        if launch.is_first():
            print_runs(runs)
        outcomes = _run(placed, launched, True, book)
    if not launch.is_first():
        return
    done = [(run, o) for run, o in zip(runs, outcomes, strict=False) if o.finished]
    if done:
        _print([run for run, _ in done], [outcome for _, outcome in done])
    if len(done) < len(runs):
        again = "" if out is None else "; the same command goes on"
        console.print(f"Stopped after {len(done)} of {len(runs)} runs{again}.", highlight=False)
    if out is not None:
        with reported():
            _write_page(placed, out / "report.html")


def _write_page(placed: list[tuple[Run, Path | None]], path: Path) -> None:
    """A page of the runs that are finished, if there are any."""
    entries = [
        comparison.Entry.read(folder, run)
        for run, folder in placed
        if folder and runner.read_result(folder)
    ]
    if entries:
        page.write(comparison.page(entries), path)
        console.print(f"{path}", highlight=False, markup=False)


def print_runs(runs: list[Run]) -> None:
    """Print what will be done with all settings, a table per job."""
    for job in dict.fromkeys(run.job for run in runs):
        text = config.to_toml(*(run for run in runs if run.job == job))
        console.print(text, markup=False, highlight=False, soft_wrap=True)


def find_workers(run: Run, workers: int | None, default: int) -> tuple[Run, bool]:
    """The run with its number of workers, and whether a launcher has started them, us among them.

    As many as --workers says; else as the launcher, the configuration or the default.
    """
    found = launch.find_launcher()
    if found is not None and workers is not None and found[1] > 1:
        raise ValueError(
            f"a launcher has started {found[1]} of us already; give it without --workers"
        )
    if found is None or workers is not None:
        return replace(run, workers=run.workers or default), False
    if run.net != "none":
        raise ValueError("--net shapes the links of --workers, not those of a launcher")
    return replace(run, workers=found[1]), True


def _run(
    runs: list[tuple[Run, Path | None]], launched: bool, resume: bool, book: Path | None = None
) -> list[Outcome]:
    """All runs, with a bar each."""
    with make_bars(console, disable=not launch.is_first()) as progress:
        tasks: dict[int, TaskID] = {}

        def on_report(message: tuple[int, dict[str, Any]]) -> None:
            number, record = message
            run = runs[number][0]
            if number not in tasks:
                tasks[number] = progress.add_task(run.recipe, total=None, note="")
            progress.update(tasks[number], completed=record["step"], total=record["total"],
                            note=_note(record, run, run.workers or 1))  # fmt: skip

        def prepare() -> None:
            if book is not None:  # there will be a page beside it
                page.possible()
            for run, folder in runs:
                if folder is not None:
                    runner.check_folder(run, folder, resume)

        if launched:
            return runner.run_launched(runs, prepare, on_report, book)

        def on_stop() -> None:
            progress.console.print("finishing the step; once more ends at once", highlight=False)

        prepare()
        return runner.run_local(runs, on_report, book, on_stop)


def _note(record: dict[str, Any], run: Run, workers: int) -> str:
    """Loss, examples a second, megabytes and density; or the score."""
    if "seconds" not in record:
        shown = [f"{k} {v:.4g}" for k, v in record.items() if k not in _COUNTS]
        return ", ".join(shown[:2])
    examples = run.settings.batch * run.settings.accumulate * workers
    loss = f"loss {record['loss']:.3f}, " if "loss" in record else ""
    return (
        f"{loss}{examples / max(record['seconds'], 1e-9):.0f}/s, "
        f"{record['bytes_sent'] / 1e6:.1f} MB, {100 * record['density']:.3g} %"
    )


_COUNTS = {"step", "total", "elapsed", "bytes_sent", "density", "seconds"}


def _print(runs: list[Run], outcomes: list[Outcome]) -> None:
    """One table, of all jobs."""
    by_job: dict[str, list[Outcome]] = {}
    for run, outcome in zip(runs, outcomes, strict=True):
        by_job.setdefault(run.job, []).append(outcome)
    data = dict.fromkeys(f"{run.job}, {run.size}, on {run.material}" for run in runs)
    console.print(lay_out(comparison.of_jobs(by_job), "; ".join(data), console.width))
