"""`thinwire prove`: the papers' assumptions, measured in a real training, with a verdict."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from thinwire import recipes
from thinwire.cli.app import app, console, reported
from thinwire.jobs import config, launch, logs, loop
from thinwire.jobs.config import Run
from thinwire.jobs.launch import Place
from thinwire.lab import workers as local
from thinwire.proofs.study import Proof, Study, as_rows
from thinwire.report import page, proved


@app.command()
def prove(
    job: Annotated[str, typer.Argument(help="Which; `thinwire list` names them.")],
    recipe: Annotated[list[str], typer.Option(help="A recipe call; repeatable.")],
    workers: Annotated[int, typer.Option(min=1, max=64, help="Local worker processes.")] = 4,
    size: Annotated[str, typer.Option(help="tiny, small or paper.")] = "tiny",
    data: Annotated[str | None, typer.Option(help="Files, or fake.")] = None,
    steps: Annotated[int, typer.Option(min=4, help="Steps of training.")] = 60,
    every: Annotated[int, typer.Option(min=2, help="Look at two steps in so many.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write proof.json, proof.html.")] = None,
) -> None:
    """Whether what the convergence proofs assume holds in this training; exit code 1 if not."""
    with reported():
        runs = [
            config.made({"job": job, "size": size, "recipe": call, "data": data,
                         "settings": {"steps": steps}})
            for call in dict.fromkeys(recipe)
        ]  # fmt: skip
        for call in recipe:  # PyTorch's own ways cannot be looked into, and some recipes neither
            Study(recipes.parse(call), every).wrap(recipes.parse(call))
        if (launch.launched() or (0, 1))[1] > 1:
            raise ValueError("prove starts workers of its own; run it without a launcher")
        if out is not None:
            page.possible()
            logs.prepared(out)
        proofs: list[Proof] = local.run(workers, _worker, runs, every)[0]
        if out is not None:
            logs.written(out / "proof.json", _json(proofs))
            page.write(proved.page(f"{job}, {size}, {workers} workers", proofs), out / "proof.html")
    if as_json:
        console.print_json(_json(proofs))
    else:
        for proof in proofs:
            console.print(_table(proof))
    if not all(proof.held for proof in proofs):
        raise typer.Exit(1)


def _worker(rank: int, world: int, report: Any, runs: list[Run], every: int) -> list[Proof]:
    place = Place(rank=rank, world=world)
    proofs = []
    for run in runs:
        study = Study(recipes.parse(run.recipe), every)
        loop.train(place, run, wrap=study.wrap, after=study.close)
        proofs.append(study.proof(run.recipe))
    return proofs


def _json(proofs: list[Proof]) -> str:
    """What could not be asked is null: JSON has no NaN."""
    told = [
        asdict(proof) | {"verdicts": [asdict(v) | {"margin": v.margin} for v in proof.verdicts]}
        for proof in proofs
    ]
    return json.dumps(logs.plain(told), indent=2, allow_nan=False) + "\n"


def _table(proof: Proof) -> Table:
    table = Table(box=None, pad_edge=False, title=escape(proof.recipe), title_justify="left")
    head, *rows = as_rows(proof)
    for number, name in enumerate(head):
        table.add_column(name, justify="left" if number in (0, 4, 5) else "right")
    colours = {"held": "green", "violated": "red", "told": "dim"}
    for row in rows:
        table.add_row(*row[:4], f"[{colours[row[4]]}]{row[4]}[/]", escape(row[5]))
    return table
