"""`thinwire prove`: assumptions of the convergence proofs, measured in a real training."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from thinwire import recipes
from thinwire_lab import files
from thinwire_lab.cli import options
from thinwire_lab.cli.app import app, console, reported
from thinwire_lab.cli.train import print_runs
from thinwire_lab.local import workers as local
from thinwire_lab.proofs.study import Proof, Study, as_rows
from thinwire_lab.report import page, proof
from thinwire_lab.runs import config, launch, logs, loop, runner
from thinwire_lab.runs.config import Run
from thinwire_lab.runs.launch import Worker

WORKERS, STEPS = 4, 60  # unless the file or a flag says otherwise
VIOLATED = 3  # exit code; 1 is work that failed, 2 bad input


@app.command()
def prove(
    job: Annotated[str, typer.Argument(help="Job to train; `thinwire list` names them.")],
    recipe: Annotated[list[str], typer.Option(help="Recipe to check, as a call; repeatable.")],
    workers: Annotated[
        int | None, typer.Option(min=1, max=64, help="Local workers (default 4).")
    ] = None,
    size: options.Size = None,
    data: options.DataPath = None,
    checkpoint: options.Weights = None,
    config_file: options.Config = None,
    steps: Annotated[int | None, typer.Option(min=4, help="Training steps (default 60).")] = None,
    batch: options.Batch = None,
    rate: options.Rate = None,
    seed: options.Seed = None,
    setting: options.Setting = None,
    every: Annotated[int, typer.Option(min=2, help="Measure two steps out of this many.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for proof.json and proof.html.")] = None,
) -> None:
    """Check what convergence proofs assume in a real training; exit code 3 if it fails."""
    with reported():
        base: dict[str, Any] = {"workers": WORKERS, "settings": {"steps": STEPS}}
        if config_file is not None:
            base = options.override(base, config.read_toml(config_file))
        runs = []
        for call in dict.fromkeys(recipe):
            runs.append(config.make_run(options.merge(
                base, setting, job=job, recipe=call, size=size, data=data, workers=workers,
                checkpoint=checkpoint, steps=steps, batch=batch, rate=rate, seed=seed,
            )))  # fmt: skip
        for call in recipe:  # some recipes cannot be measured
            if call in config.BASELINES:
                raise ValueError(f"{call} is PyTorch's own and cannot be looked into; try topk()")
            Study(recipes.parse(call), every).wrap(recipes.parse(call))
        if (launch.find_launcher() or (0, 1))[1] > 1:
            raise ValueError("prove starts workers of its own; run it without a launcher")
        if out is not None:
            page.possible()
            logs.check_writable(out)
        if not as_json:
            print_runs(runs)
        proofs = _find_proofs(runs, every, quiet=as_json)
        if out is not None:
            title = f"{job}, {runs[0].size}, {runs[0].workers} workers"
            drawn = page.html(proof.page(title, proofs))
            files.write_all(out, {"proof.json": _to_json(proofs), "proof.html": drawn})
    if as_json:
        console.print_json(_to_json(proofs))
    else:
        for one in proofs:
            console.print(_make_table(one))
    if not all(one.held for one in proofs):
        raise typer.Exit(VIOLATED)


def _find_proofs(runs: list[Run], every: int, quiet: bool) -> list[Proof]:
    """On local workers, with a bar for all runs together."""
    with Progress(console=console, transient=True, disable=quiet) as progress:
        task = progress.add_task("looking", total=None)

        def on_report(message: tuple[int, dict[str, Any]]) -> None:
            number, record = message
            each = record["total"]
            progress.update(task, completed=number * each + record["step"], total=len(runs) * each)

        world, net = runs[0].workers or WORKERS, runs[0].net
        return local.run(world, _worker, runs, every, on_report=on_report, net=net)[0]


def _worker(rank: int, world: int, report: Any, runs: list[Run], every: int) -> list[Proof]:
    worker = Worker(rank=rank, world=world)
    proofs: list[Proof] = []
    for number, run in enumerate(runs):
        numbered = runner.number_reports(report, number) if rank == 0 else lambda record: None
        study = Study(recipes.parse(run.recipe), every)
        loop.train(worker, run, report=numbered, wrap=study.wrap, after=study.close)
        proofs.append(launch.agree(partial(study.proof, run.recipe)))
    return proofs


def _to_json(proofs: list[Proof]) -> str:
    """What could not be measured is null: JSON has no NaN."""
    listed = [
        asdict(one) | {"verdicts": [asdict(v) | {"margin": v.margin} for v in one.verdicts]}
        for one in proofs
    ]
    return json.dumps(files.nan_to_null(listed), indent=2, allow_nan=False) + "\n"


def _make_table(proof: Proof) -> Table:
    table = Table(box=None, pad_edge=False, title=escape(proof.recipe), title_justify="left")
    head, *rows = as_rows(proof)
    for number, name in enumerate(head):
        table.add_column(name, justify="left" if number in (0, 4, 5) else "right")
    colours = {"held": "green", "violated": "red", "told": "dim"}
    for row in rows:
        table.add_row(*row[:4], f"[{colours[row[4]]}]{row[4]}[/]", escape(row[5]))
    return table
