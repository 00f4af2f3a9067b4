"""`thinwire demo`: real training over a slow link, and how soon each recipe gets there."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from thinwire.plan import units
from thinwire_lab.cli.app import app, console, reported
from thinwire_lab.cli.display import make_table

TARGET = 0.95  # test accuracy that the times are measured to
SETTINGS = {"batch": 16, "rate": 0.1, "momentum": 0.9, "warmup": 0.5, "score_every": 0.25}


@dataclass(frozen=True, kw_only=True)
class Result:
    """What one recipe gave."""

    seconds: float | None  # of training until TARGET was first reached
    accuracy: float
    bytes_sent: float


@app.command()
def demo(
    workers: Annotated[int, typer.Option(min=1, max=64, help="Local worker processes.")] = 4,
    steps: Annotated[int, typer.Option(min=1, help="Training steps per recipe.")] = 160,
    link: Annotated[str, typer.Option(help="Rate of each worker's link.")] = "20mbit",
) -> None:
    """Train on handwritten digits over a slow link: dense, 16 bits and a tuned recipe.

    The link is throttled in software, so this needs neither root nor a network.
    """
    from thinwire_lab.local import workers as local

    begin = time.perf_counter()
    calls = {"dense": "dense()", "16 bits": "half()", "tuned": f"tuned(saving=20, steps={steps})"}
    with reported():
        rate = units.rate(link)
        console.print(
            f"{workers} workers on this machine, scikit-learn's digits, an MLP of 85,002 "
            f"parameters, {steps} steps per recipe. The link is throttled in software to "
            f"{rate / 1e6:g} Mbit/s per worker."
        )
        columns = (TextColumn("{task.description:>8}"), BarColumn(), MofNCompleteColumn(),
                   TimeElapsedColumn(), TextColumn("{task.fields[note]}"))  # fmt: skip
        with Progress(*columns, console=console) as progress:
            tasks = {
                call: progress.add_task(name, total=steps, start=False, note="")
                for name, call in calls.items()
            }

            def show(message: tuple[str, int, str]) -> None:
                call, done, note = message
                progress.start_task(tasks[call])
                progress.update(tasks[call], completed=done, note=note)

            results = local.run(
                workers, _train_all, list(calls.values()), steps, rate, on_report=show
            )[0]
    console.print(_make_table(dict(zip(calls, results, strict=True))))
    console.print(f"\ntuned: {calls['tuned']}", highlight=False)
    console.print(
        f"Done in {time.perf_counter() - begin:.0f} s. Only link time is simulated; computing, "
        "selecting and coding take the time they take here."
    )


def _train_all(
    rank: int, world: int, report: Any, calls: list[str], steps: int, rate: float
) -> list[Result]:
    from thinwire.engine.session import throttle
    from thinwire_lab.runs import config, loop
    from thinwire_lab.runs.launch import Worker

    results = []
    for call in calls:
        run = config.make_run(
            {"job": "mlp", "size": "tiny", "recipe": call, "settings": SETTINGS | {"steps": steps}}
        )
        scores: list[dict[str, Any]] = []
        follow = partial(_follow, report if rank == 0 else None, call, scores)
        outcome = loop.train(
            Worker(rank=rank, world=world), run, report=follow, before=partial(throttle, rate=rate)
        )
        reached = (s["elapsed"] for s in scores if s["accuracy"] >= TARGET)
        results.append(Result(
            seconds=next(reached, None), accuracy=outcome.figures["accuracy"],
            bytes_sent=outcome.metrics["bytes_sent"],
        ))  # fmt: skip
    return results


def _follow(report: Any, call: str, scores: list[dict[str, Any]], record: dict[str, Any]) -> None:
    if "accuracy" in record:
        scores.append(record)
    if report is not None:
        note = f"{100 * scores[-1]['accuracy']:.1f} %" if scores else ""
        report((call, record["step"], note))


def _make_table(results: dict[str, Result]) -> Table:
    rows = [["recipe", f"seconds to {TARGET:.0%}", "times faster", "final accuracy", "MB sent"]]
    dense = results["dense"].seconds
    for name, result in results.items():
        seconds = result.seconds
        faster = "" if dense is None or seconds is None else f"{dense / seconds:.1f}"
        rows.append([
            name, "not reached" if seconds is None else f"{seconds:.1f}", faster,
            f"{100 * result.accuracy:.1f} %", f"{result.bytes_sent / 1e6:.1f}",
        ])  # fmt: skip
    return make_table(rows)
