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
from thinwire.lab import selection
from thinwire.lab import step as lab
from thinwire.lab.rows import unserved
from thinwire.schedule import checked_density

bench = typer.Typer(help="Measure, beside references of the same run.", no_args_is_help=True)
app.add_typer(bench, name="bench")

RECIPES = (
    "half()", "int8()", "signsgd()", "randomk(density=0.01)", "topk(density=0.01)",
    "dgc(density=0.01)", "sidco(density=0.01)", "adtopk(density=0.01)", "gtopk(density=0.01)",
    "oktopk(density=0.01)", "spardl(density=0.01)", "powersgd(rank=4)", "acpsgd(rank=4)",
)  # fmt: skip


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


@bench.command()
def selectors(
    n: Annotated[int, typer.Option("--n", min=100, help="Numbers to select from.")] = 1_000_000,
    density: Annotated[float, typer.Option(help="Share to keep.")] = 0.01,
    steps: Annotated[int, typer.Option(min=1, help="Steps of error feedback.")] = 20,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the figures here.")
    ] = None,
) -> None:
    """Every selector beside exact top-k, and the rows of a real model they leave out."""
    table = Table(box=None, pad_edge=False)
    table.add_column("data")
    table.add_column("selector")
    for column in ("found / asked", "energy sent", "ms", "x topk"):
        table.add_column(column, justify="right")
    rows: list[selection.Row] = []
    total = 3 * len(selection.SELECTORS)
    calls = [f"{name}(density={density})" for name in ("topk", "adtopk")]
    with reported(), Progress(console=console) as progress:
        checked_density(density)
        for row in progress.track(selection.measure(n, density, steps), total=total):
            rows.append(row)
            reference = next(r for r in rows if (r.selector, r.data) == (selection.EXACT, row.data))
            table.add_row(
                row.data,
                row.selector,
                f"{row.fewest:.2f} - {row.most:.2f}",
                f"{100 * row.energy:.1f} %",
                f"{1000 * row.seconds:.1f}",
                f"{row.seconds / reference.seconds:.2f}",
            )
        shares = unserved(calls)
    console.print(table)
    console.print(f"\n{n:,} numbers, density {density}, {steps} steps, one thread, medians.")
    console.print("Weight rows of the digits model that send nothing in a step:")
    for call, share in shares.items():
        console.print(f"  {call}: {100 * share:.1f} %", highlight=False)
    if json_file is not None:
        figures = {"selectors": [asdict(row) for row in rows], "rows that send nothing": shares}
        json_file.write_text(json.dumps(figures, indent=2) + "\n")


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
