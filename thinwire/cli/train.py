"""`thinwire train` and `thinwire compare`: real trainings, one recipe or several."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import TaskID

from thinwire.cli import asked
from thinwire.cli.app import app, console, reported
from thinwire.cli.display import bars, shown
from thinwire.jobs import config, launch, ledger, logs, runner
from thinwire.jobs.config import Run
from thinwire.jobs.loop import Outcome
from thinwire.report import compared, page

Size = Annotated[str | None, typer.Option(help="tiny, small or paper.")]
Workers = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=config.MOST_WORKERS,
        help="Local processes: 2 to train, 4 to compare, or those of torchrun, srun, mpirun.",
    ),
]
Net = Annotated[
    str | None, typer.Option(help="Links of a rate, as 1gbit; none: loopback, the default.")
]
DataPath = Annotated[str | None, typer.Option(help="Files, or fake; else what comes with Python.")]
Weights = Annotated[Path | None, typer.Option(help="A local checkpoint to start from.")]
Config = Annotated[Path | None, typer.Option("--config", help="A TOML file; flags win over it.")]
Setting = Annotated[
    list[str] | None, typer.Option("--set", help="A setting, as rate=0.1; repeatable.")
]
Epochs = Annotated[float | None, typer.Option(help="Passes over the data.")]
Steps = Annotated[int | None, typer.Option(min=1, help="Steps, instead of epochs.")]
Batch = Annotated[int | None, typer.Option(help="Examples a worker.")]
Rate = Annotated[float | None, typer.Option(help="Highest learning rate.")]
Seed = Annotated[int | None, typer.Option(help="Of weights and shuffles.")]


@app.command()
def train(
    job: Annotated[str, typer.Argument(help="Which; `thinwire list` names them.")],
    recipe: Annotated[str | None, typer.Option(help="A recipe call.")] = None,
    workers: Workers = None,
    size: Size = None,
    net: Net = None,
    data: DataPath = None,
    checkpoint: Weights = None,
    out: Annotated[Path | None, typer.Option(help="Where logs and checkpoints go.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with the run in this folder.")] = None,
    config_file: Config = None,
    epochs: Epochs = None,
    steps: Steps = None,
    batch: Batch = None,
    rate: Rate = None,
    seed: Seed = None,
    setting: Setting = None,
) -> None:
    """Train a job with a recipe, on local workers or under torchrun, srun or mpirun.

    Ctrl-C and SIGTERM finish the step, save, and end.
    """
    with reported():
        with launch.refused_together(config_file, resume):
            if resume is not None and out not in (None, resume):
                raise ValueError("--resume goes on in its own folder; give it without --out")
            base = config.read(config_file) if config_file else {}
            if resume is not None:
                base = asked.over(config.read(resume / logs.CONFIG), base)
            given = {"epochs": epochs, "steps": steps, "batch": batch, "rate": rate, "seed": seed}
            flags = asked.flags(job, recipe, size, data, net, workers, checkpoint)
            run = config.made(asked.merged(base, flags, given, setting))
            folder = resume or out
            group = Group.of(workers, run, 2)
            run = replace(run, workers=group.world)
        if group.first:
            told([run])
        outcomes = _run([(run, folder)], group, resume is not None)
    if not group.first:
        return
    (outcome,) = outcomes
    _print([run], [outcome])
    examples = run.settings.batch * run.settings.accumulate * group.world
    console.print(f"{examples / outcome.step_seconds:.4g} examples a second", highlight=False)
    if not outcome.finished:
        where = f"; go on with --resume {folder}" if folder is not None else ""
        console.print(f"Stopped after step {outcome.steps}{where}.", highlight=False, markup=False)


@app.command()
def compare(
    job: Annotated[list[str], typer.Argument(help="One job or several.")],
    recipe: Annotated[
        list[str], typer.Option(help="A recipe call, or ddp, fp16-hook, powersgd-hook; repeatable.")
    ],
    workers: Workers = None,
    size: Size = None,
    net: Net = None,
    data: DataPath = None,
    checkpoint: Weights = None,
    out: Annotated[Path | None, typer.Option(help="Where runs and report.html go.")] = None,
    config_file: Config = None,
    seeds: Annotated[str | None, typer.Option(help="As 0,1,2: every recipe with each.")] = None,
    epochs: Epochs = None,
    steps: Steps = None,
    batch: Batch = None,
    rate: Rate = None,
    setting: Setting = None,
) -> None:
    """Train with several recipes under the same seeds; a table, and with --out one HTML page.

    Runs that --out holds already are not repeated; one that was interrupted goes on. Each that ends
    is appended to results.jsonl, of which `thinwire results` makes a table.
    """
    with reported():
        runs = []
        with launch.refused_together(config_file):
            base = config.read(config_file) if config_file else {}
            given = {"epochs": epochs, "steps": steps, "batch": batch, "rate": rate}
            for name in dict.fromkeys(job):
                for call in dict.fromkeys(recipe):
                    flags = asked.flags(name, call, size, data, net, workers, checkpoint)
                    made = config.made(asked.merged(base, flags, given, setting))
                    group = Group.of(workers, made, 4)
                    made = replace(made, workers=group.world)
                    runs += [
                        asked.seeded(made, s) for s in asked.seeds_of(seeds, made.settings.seed)
                    ]
        placed = [(run, None if out is None else out / runner.folder(run)) for run in runs]
        book = None if out is None else out / ledger.NAME
        if group.first:
            told(runs)
        outcomes = _run(placed, group, True, book)
    if not group.first:
        return
    done = [(run, o) for run, o in zip(runs, outcomes, strict=False) if o.finished]
    if done:
        _print([run for run, _ in done], [outcome for _, outcome in done])
    if len(done) < len(runs):
        again = "" if out is None else "; the same command goes on"
        console.print(f"Stopped after {len(done)} of {len(runs)} runs{again}.", highlight=False)
    if out is not None:
        with reported():
            entries = [compared.Entry.read(f, run) for run, f in placed if f and runner.result(f)]
            if entries:
                page.write(compared.page(entries), out / "report.html")
                console.print(f"{out / 'report.html'}", highlight=False, markup=False)


def told(runs: list[Run]) -> None:
    """What will be done, everything in it: a table a job."""
    for job in dict.fromkeys(run.job for run in runs):
        text = config.written(*(run for run in runs if run.job == job))
        console.print(text, markup=False, highlight=False, soft_wrap=True)


@dataclass(frozen=True)
class Group:
    """Who trains: workers that we start, or those that a launcher has started us among."""

    rank: int
    world: int
    launched: bool

    @staticmethod
    def of(workers: int | None, run: Run, default: int) -> Group:
        """As many as were asked for; else the launcher's, the configuration's or the default."""
        found = launch.launched()
        if found is not None and workers is not None and found[1] > 1:
            raise ValueError(
                f"a launcher has started {found[1]} of us already; give it without --workers"
            )
        if found is not None and workers is None:
            if run.net != "none":
                raise ValueError("--net shapes the links of --workers, not those of a launcher")
            return Group(found[0], found[1], True)
        return Group(0, run.workers or default, False)

    @property
    def first(self) -> bool:
        return self.rank == 0


def _run(
    runs: list[tuple[Run, Path | None]],
    group: Group,
    resume: bool,
    book: Path | None = None,
) -> list[Outcome]:
    """All runs, with a bar each."""
    with bars(console, disable=not group.first) as progress:
        tasks: dict[int, TaskID] = {}

        def on_report(message: tuple[int, dict[str, Any]]) -> None:
            number, record = message
            run = runs[number][0]
            if number not in tasks:
                tasks[number] = progress.add_task(run.recipe, total=None, note="")
            progress.update(tasks[number], completed=record["step"], total=record["total"],
                            note=_note(record, run, group.world))  # fmt: skip

        def prepare() -> None:
            if book is not None:  # there will be a page beside it
                page.possible()
            for run, folder in runs:
                if folder is not None:
                    runner.prepared(run, folder, resume)

        if group.launched:
            return runner.launched(runs, prepare, on_report, book)

        def on_stop() -> None:
            progress.console.print("finishing the step; once more ends at once", highlight=False)

        prepare()
        return runner.local(group.world, runs, runs[0][0].net, on_report, book, on_stop)


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
    console.print(shown(compared.of_jobs(by_job), "; ".join(data), console.width))
