"""`thinwire bench`: measurements, every figure beside its reference from the same run."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress
from rich.table import Table

from thinwire.cli.app import app, console, reported
from thinwire.lab import step as lab

bench = typer.Typer(help="Measure, beside references of the same run.", no_args_is_help=True)
app.add_typer(bench, name="bench")

RECIPES = ("half()", "randomk(density=0.01)", "topk(density=0.01)", "adtopk(density=0.01)",
           "powersgd(rank=4)", "acpsgd(rank=4)")  # fmt: skip


@bench.callback()
def _commands() -> None:
    """Measure, beside references of the same run."""


@bench.command()
def step(
    recipe: Annotated[list[str] | None, typer.Option(help="A recipe call; repeatable.")] = None,
    workers: Annotated[int, typer.Option(min=1, max=64, help="Local worker processes.")] = 4,
    batch: Annotated[int, typer.Option(min=1, help="Examples a worker.")] = 16,
    rounds: Annotated[int, typer.Option(min=1, help="Turns each contender gets.")] = 6,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the figures here.")
    ] = None,
) -> None:
    """One training step of a 2.1 M-parameter MLP, on loopback."""
    calls = list(recipe or RECIPES)
    trial = lab.Trial(batch=batch, rounds=rounds)
    with reported(), Progress(console=console) as progress:
        task = progress.add_task("measuring", total=rounds * (len(calls) + 2))
        rows = lab.measure(calls, workers, trial, lambda message: progress.advance(task))
    console.print(_table(rows))
    console.print(
        f"{workers} workers, medians; loopback: nothing is gained by sending less, so this shows "
        "what compression itself costs."
    )
    if json_file is not None:
        json_file.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")


def _table(rows: list[lab.Row]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("step")
    for column in ("ms", "x DDP", "KB sent", "x less", "exposed ms"):
        table.add_column(column, justify="right")
    plain = next(row for row in rows if row.name == lab.PLAIN)
    for row in rows:
        fewer = f"{row.bytes_dense / row.bytes_sent:.1f}" if row.bytes_sent else ""
        exposed = "" if row.exposed != row.exposed else f"{1000 * row.exposed:.1f}"
        table.add_row(
            row.name,
            f"{1000 * row.seconds:.1f}",
            f"{row.seconds / plain.seconds:.2f}",
            f"{row.bytes_sent / 1024:.1f}",
            fewer,
            exposed,
        )
    return table
