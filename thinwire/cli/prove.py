"""`thinwire prove`: the papers' assumptions, measured in a real training, with a verdict."""

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
from thinwire.cli import asked
from thinwire.cli.app import app, console, reported
from thinwire.cli.train import (
    Batch,
    Config,
    DataPath,
    Rate,
    Seed,
    Setting,
    Size,
    Weights,
    told,
)
from thinwire.jobs import config, launch, logs, loop, runner
from thinwire.jobs.config import Run
from thinwire.jobs.launch import Place
from thinwire.lab import workers as local
from thinwire.proofs.study import Proof, Study, as_rows
from thinwire.report import page, proved

WORKERS, STEPS = 4, 60  # unless the file or a flag says otherwise
VIOLATED = 3  # exit code; 1 is work that failed, 2 bad input


@app.command()
def prove(
    job: Annotated[str, typer.Argument(help="Which; `thinwire list` names them.")],
    recipe: Annotated[list[str], typer.Option(help="A recipe call; repeatable.")],
    workers: Annotated[int | None, typer.Option(min=1, max=64, help="Local processes; 4.")] = None,
    size: Size = None,
    data: DataPath = None,
    checkpoint: Weights = None,
    config_file: Config = None,
    steps: Annotated[int | None, typer.Option(min=4, help="Of training; 60 if not given.")] = None,
    batch: Batch = None,
    rate: Rate = None,
    seed: Seed = None,
    setting: Setting = None,
    every: Annotated[int, typer.Option(min=2, help="Look at two steps in so many.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write proof.json, proof.html.")] = None,
) -> None:
    """Whether what the convergence proofs assume holds in this training; exit code 3 if not."""
    with reported():
        base: dict[str, Any] = {"workers": WORKERS, "settings": {"steps": STEPS}}
        if config_file is not None:
            base = asked.over(base, config.read(config_file))
        given = {"steps": steps, "batch": batch, "rate": rate, "seed": seed}
        runs = [
            config.made(asked.merged(
                base, asked.flags(job, call, size, data, None, workers, checkpoint), given, setting
            ))
            for call in dict.fromkeys(recipe)
        ]  # fmt: skip
        for call in recipe:  # some recipes cannot be looked into
            if call in config.BASELINES:
                raise ValueError(f"{call} is PyTorch's own and cannot be looked into; try topk()")
            Study(recipes.parse(call), every).wrap(recipes.parse(call))
        if (launch.launched() or (0, 1))[1] > 1:
            raise ValueError("prove starts workers of its own; run it without a launcher")
        if out is not None:
            page.possible()
            logs.prepared(out)
        if not as_json:
            told(runs)
        proofs = _proofs(runs, every, quiet=as_json)
        if out is not None:
            title = f"{job}, {runs[0].size}, {runs[0].workers} workers"
            drawn = page.html(proved.page(title, proofs))
            logs.together(out, {"proof.json": _json(proofs), "proof.html": drawn})
    if as_json:
        console.print_json(_json(proofs))
    else:
        for proof in proofs:
            console.print(_table(proof))
    if not all(proof.held for proof in proofs):
        raise typer.Exit(VIOLATED)


def _proofs(runs: list[Run], every: int, quiet: bool) -> list[Proof]:
    """On local workers, with a bar for all runs together."""
    with Progress(console=console, transient=True, disable=quiet) as progress:
        task = progress.add_task("looking", total=None)

        def on_report(message: tuple[int, dict[str, Any]]) -> None:
            number, record = message
            each = record["total"]
            progress.update(task, completed=number * each + record["step"], total=len(runs) * each)

        found: list[Proof] = local.run(
            runs[0].workers or WORKERS, _worker, runs, every, on_report=on_report, net=runs[0].net
        )[0]
    return found


def _worker(rank: int, world: int, report: Any, runs: list[Run], every: int) -> list[Proof]:
    place = Place(rank=rank, world=world)
    proofs: list[Proof] = []
    for number, run in enumerate(runs):
        tell = runner.numbered(report, number) if rank == 0 else lambda record: None
        study = Study(recipes.parse(run.recipe), every)
        loop.train(place, run, tell=tell, wrap=study.wrap, after=study.close)
        launch.agreed(partial(_proven, study, run.recipe, proofs))
    return proofs


def _proven(study: Study, recipe: str, proofs: list[Proof]) -> None:
    proofs.append(study.proof(recipe))


def _json(proofs: list[Proof]) -> str:
    """What could not be asked is null: JSON has no NaN."""
    listed = [
        asdict(proof) | {"verdicts": [asdict(v) | {"margin": v.margin} for v in proof.verdicts]}
        for proof in proofs
    ]
    return json.dumps(logs.plain(listed), indent=2, allow_nan=False) + "\n"


def _table(proof: Proof) -> Table:
    table = Table(box=None, pad_edge=False, title=escape(proof.recipe), title_justify="left")
    head, *rows = as_rows(proof)
    for number, name in enumerate(head):
        table.add_column(name, justify="left" if number in (0, 4, 5) else "right")
    colours = {"held": "green", "violated": "red", "told": "dim"}
    for row in rows:
        table.add_row(*row[:4], f"[{colours[row[4]]}]{row[4]}[/]", escape(row[5]))
    return table
