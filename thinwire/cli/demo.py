"""`thinwire demo`: the whole idea in a minute, on this machine, with real data."""

from __future__ import annotations

import time
from functools import partial
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from thinwire.cli.app import app, console, reported

RECIPES = ("dense()", "adtopk(density=0.01)", "topk(density=0.01)", "acpsgd(rank=2)")


@app.command()
def demo(
    workers: Annotated[int, typer.Option(min=1, max=64, help="Local worker processes.")] = 4,
    steps: Annotated[int, typer.Option(min=1, help="Training steps a recipe.")] = 1000,
) -> None:
    """Train on handwritten digits, dense and compressed, and compare."""
    from thinwire.lab import workers as local

    console.print(
        f"{workers} workers on this machine, scikit-learn's digits, {steps} steps a recipe."
    )
    begin = time.perf_counter()
    label = TextColumn("{task.description:>22}")
    columns = (label, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with reported(), Progress(*columns, console=console) as progress:
        tasks = {call: progress.add_task(call, total=steps, start=False) for call in RECIPES}

        def on_report(message: tuple[str, int]) -> None:
            call, done = message
            progress.start_task(tasks[call])
            progress.update(tasks[call], completed=done)

        outcomes = local.run(workers, _worker, RECIPES, steps, on_report=on_report)[0]
        for task in tasks.values():
            progress.update(task, completed=steps)
    console.print(_table(dict(zip(RECIPES, outcomes, strict=True))))
    console.print(f"Training loss of dense at the end: {outcomes[0].loss:.4f}.")
    console.print(
        f"Done in {time.perf_counter() - begin:.0f} s. Time a step is on loopback, where sending "
        "costs next to nothing: compression pays on a network, not here.",
        soft_wrap=False,
    )


def _worker(rank: int, world: int, report: Any, calls: tuple[str, ...], steps: int) -> list[Any]:
    from thinwire.jobs import config, loop
    from thinwire.jobs.launch import Place

    settings = {"steps": steps, "batch": 16, "rate": 0.2, "momentum": 0.0, "warmup": 0.5}
    outcomes = []
    for call in calls:
        run = config.made({"job": "mlp", "size": "tiny", "recipe": call, "settings": settings})
        said = partial(_say, report if rank == 0 else None, call)
        outcomes.append(loop.train(Place(rank=rank, world=world), run, tell=said))
    return outcomes


def _say(report: Any, call: str, record: dict[str, Any]) -> None:
    if report is not None and record["step"] % 10 == 0:
        report((call, record["step"]))


def _table(outcomes: dict[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, title_justify="left")
    table.add_column("recipe")
    for column in ("accuracy", "vs dense", "KB/step", "x less", "density", "ms/step"):
        table.add_column(column, justify="right")
    base = next(iter(outcomes.values()))
    for call, outcome in outcomes.items():
        m = outcome.metrics
        sent = m["bytes_sent"] / max(1, m["steps"])
        fewer = m["bytes_dense"] / m["bytes_sent"] if m["bytes_sent"] else float("nan")
        behind = 100 * (outcome.figures["accuracy"] - base.figures["accuracy"])
        table.add_row(
            call,
            f"{100 * outcome.figures['accuracy']:.1f} %",
            f"{behind:+.1f}" if call != next(iter(outcomes)) else "",
            f"{sent / 1024:.1f}",
            f"{fewer:.1f}",
            f"{100 * m['density']:.2f} %",
            f"{1000 * outcome.step_seconds:.1f}",
        )
    return table
