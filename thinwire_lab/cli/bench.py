"""`thinwire bench`: measurements, each beside its reference from the same run."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import RenderableType
from rich.progress import Progress
from rich.table import Table

from thinwire.schedule import checked_density
from thinwire_lab.bench import collectives, kernels, selection, verbs
from thinwire_lab.bench import cost as costs
from thinwire_lab.bench import step as steps_bench
from thinwire_lab.bench.rows import find_unserved
from thinwire_lab.cli.app import app, console, reported
from thinwire_lab.cli.display import lay_out, make_table
from thinwire_lab.cli.options import whole
from thinwire_lab.runs.baselines import ALONE, BASELINES, PLAIN
from thinwire_lab.runs.versions import versions

bench = typer.Typer(help="Measure, beside references of the same run.", no_args_is_help=True)
app.add_typer(bench, name="bench")

RECIPES = (
    "half()", "int8()", "signsgd()", "randomk(density=0.01)", "topk(density=0.01)",
    "dgc(density=0.01)", "sidco(density=0.01)", "adtopk(density=0.01)", "gtopk(density=0.01)",
    "slots(density=0.01)", "spardl(density=0.01)", "powersgd(rank=4)", "acpsgd(rank=4)",
)  # fmt: skip

COSTS = (  # those that the documents recommend, in the order of their bytes, and their neighbours
    "half()", "bf16()", "int8()", "int4()", "tuned(saving=16, steps=1000)",
    "topk(density=0.01)", "distribute: topk(density=0.01)",
    "gtopk(density=0.01, memory=MomentumCorrected(learning_rate=True), wire='int8+auto')",
    "adtopk(density=0.01)", "slots(density=0.01)", "oktopk(density=0.01)",
    "acpsgd(rank=4)", "powersgd(rank=4)",
)  # fmt: skip

JsonFile = Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")]


def write_json(path: Path | None, figures: dict[str, Any]) -> None:
    """Write the figures as JSON, if there is a path for them; dataclasses as their fields."""
    if path is not None:
        with reported():
            complete = figures | {"versions": versions()}
            path.write_text(json.dumps(complete, indent=2, default=asdict) + "\n")


@bench.callback()
def _commands() -> None:
    """Measure, beside references of the same run."""


@bench.command()
def step(
    recipe: Annotated[list[str] | None, typer.Option(help="Recipe, as a call; repeatable.")] = None,
    model: Annotated[
        str,
        typer.Option(help="mlp (25.2 M), small (2.1 M), conv (1.1 M), a job, or module:function."),
    ] = "small",
    workers: Annotated[int, typer.Option(min=1, max=64, help="Local worker processes.")] = 4,
    net: Annotated[str, typer.Option(help="Rate of each link, as 1gbit.")] = "none",
    batch: Annotated[int, typer.Option(min=1, help="Examples per worker.")] = 16,
    bucket_mb: Annotated[float, typer.Option(min=0.01, help="DDP bucket size in MB.")] = 25.0,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds per contender.")] = 6,
    json_file: JsonFile = None,
) -> None:
    """Time a training step under each recipe, beside plain DDP and PyTorch's hooks."""
    calls = list(recipe or RECIPES)
    trial = steps_bench.Trial(model=model, batch=batch, bucket_mb=bucket_mb, net=net, rounds=rounds)
    with reported(), Progress(console=console, transient=True) as progress:
        task = progress.add_task("measuring", total=rounds * (len(calls) + len(BASELINES)))
        rows = steps_bench.measure(calls, workers, trial, lambda message: progress.advance(task))
    console.print(_make_step_table(rows))
    where = "loopback: nothing is gained by sending less" if net == "none" else f"links of {net}"
    console.print(
        f"{model}, batch {batch}, {workers} workers, medians of {rounds * trial.steps} steps, "
        f"{where}."
    )
    write_json(json_file, {"trial": asdict(trial), "workers": workers, "rows": rows})


@bench.command()
def cost(
    recipe: Annotated[
        list[str] | None,
        typer.Option(help="Recipe, as a call; after 'distribute: ' without DDP; repeatable."),
    ] = None,
    model: Annotated[str, typer.Option(help="As for `bench step`.")] = "mlp",
    workers: Annotated[int, typer.Option(min=1, max=64, help="Local worker processes.")] = 1,
    batch: Annotated[int, typer.Option(min=1, help="Examples per worker.")] = 16,
    turns: Annotated[int, typer.Option(min=1, help="Steps per contender.")] = 15,
    json_file: JsonFile = None,
) -> None:
    """Time what a recipe costs a worker, over the plain step, in units of one `add_`."""
    calls, trial = list(recipe or COSTS), costs.Trial(model=model, batch=batch, turns=turns)
    with reported(), Progress(console=console, transient=True) as progress:
        task = progress.add_task("measuring", total=2 + len(calls))
        rows = costs.measure(calls, workers, trial, lambda name: progress.advance(task))
    console.print(_lay_out_costs(rows))
    console.print(
        f"{model}, batch {batch}, {workers} worker(s), medians of {turns} steps, rank 0. The unit "
        f"is one add_ over the gradient: {1000 * rows[0].unit:.1f} ms of processor time.\n"
        "step, wall: processor and wall time over the plain step (its own in the first row).\n"
        "reduce: processor time in the recipe, and where in it. The rest is DDP and copies."
    )
    write_json(json_file, {"trial": asdict(trial), "workers": workers, "rows": rows})


@bench.command("kernels")
def bench_kernels(
    n: Annotated[
        int, typer.Option("--n", parser=whole(100_000), help="Values to work on.")
    ] = 25_000_000,
    turns: Annotated[int, typer.Option(min=1, help="Rounds per contender.")] = 9,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1,
    json_file: JsonFile = None,
) -> None:
    """Time the kernels, in units of one `add_` over the same values."""
    with reported(), Progress(console=console, transient=True) as progress:
        measured = kernels.measure(n, turns, threads)
        rows = list(progress.track(measured, total=kernels.ROWS))
    console.print(_make_kernels_table(rows))
    unit = 1000 * statistics.median(row.unit for row in rows)
    console.print(f"{n:,} values, {threads} thread(s), medians; one add_ took {unit:.1f} ms.")
    write_json(json_file, {"n": n, "threads": threads, "rows": rows})


@bench.command("collectives")
def bench_collectives(
    numel: Annotated[
        list[int] | None, typer.Option(parser=whole(1), help="Gradient size; repeatable.")
    ] = None,
    density: Annotated[list[float] | None, typer.Option(help="Density; repeatable.")] = None,
    workers: Annotated[list[int] | None, typer.Option(help="Workers; repeatable.")] = None,
    comm: Annotated[str, typer.Option(help="gloo, mpi, or gloo,mpi.")] = "gloo",
    net: Annotated[str, typer.Option(help="Rate of each link, as 1gbit.")] = "none",
    wire: Annotated[str, typer.Option(help="Wire format of values.")] = "fp32",
    steps: Annotated[int, typer.Option(min=1, help="Steps; a refresh period is 64.")] = 64,
    json_file: JsonFile = None,
) -> None:
    """Time every collective beside a dense all-reduce, and how full each verb fills the wire."""
    trials = [
        collectives.Trial(numel=n, density=d, world=w, comm=c, net=net, steps=steps, wire=wire)
        for n in numel or [4_200_000]
        for d in density or [0.01]
        for w in workers or [4]
        for c in comm.split(",")
    ]
    found = []
    with reported():
        for trial in trials:
            rows = _measure_sums(trial)
            console.print(_make_sums_table(rows))
            where = "loopback" if net == "none" else f"links of {net}"
            console.print(
                f"{trial.numel:,} gradients, density {trial.density}, {trial.world} ranks, "
                f"{trial.comm}, {where}, {trial.wire}; means of {steps} steps.\n"
            )
            found.append({"trial": trial, "rows": rows})
        filled = [
            row for w in workers or [4] for row in _measure_verbs(w, net, "gloo" in comm, steps)
        ]
    write_json(json_file, {"trials": found, "verbs": filled})


@bench.command()
def selectors(
    n: Annotated[
        int, typer.Option("--n", parser=whole(100), help="Values to select from.")
    ] = 1_000_000,
    density: Annotated[float, typer.Option(help="Share of values to keep.")] = 0.01,
    steps: Annotated[int, typer.Option(min=1, help="Steps of error feedback.")] = 20,
    json_file: JsonFile = None,
) -> None:
    """Compare every selector with exact top-k, and count model rows that send nothing."""
    total = 3 * len(selection.SELECTORS)
    calls = [f"{name}(density={density})" for name in ("topk", "adtopk")]
    with reported(), Progress(console=console) as progress:
        checked_density(density)
        rows = list(progress.track(selection.measure(n, density, steps), total=total))
        shares = find_unserved(calls)
    console.print(_make_selectors_table(rows))
    console.print(f"\n{n:,} values, density {density}, {steps} steps, one thread, medians.")
    console.print("Weight rows of the digits model that send nothing in a step:")
    for call, share in shares.items():
        console.print(f"  {call}: {100 * share:.1f} %", highlight=False)
    write_json(json_file, {"selectors": rows, "rows that send nothing": shares})


def _measure_sums(trial: collectives.Trial) -> list[collectives.Row]:
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("measuring", total=collectives.turns(trial))
        return collectives.measure(trial, lambda name: progress.advance(task))


def _measure_verbs(world: int, net: str, over_gloo: bool, steps: int) -> list[verbs.Row]:
    """Every verb at every size, printed as a table; nothing for MPI, which has verbs of its own."""
    if world == 1 or not over_gloo:
        return []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("measuring", total=len(verbs.SIZES))
        rows = verbs.measure(
            world, net, turns=max(1, min(7, steps)), on_report=lambda size: progress.advance(task)
        )
    sizes = [f"{n / 1e6:.3g} MB" if n >= 1e6 else f"{n // 1024} KB" for n in verbs.SIZES]
    cells = [["ms" if net == "none" else "share of the rate", *sizes]]
    for verb in dict.fromkeys(row.verb for row in rows):
        cells.append([verb, *(_show_filled(row) for row in rows if row.verb == verb)])
    console.print(make_table(cells))
    console.print(
        f"{world} ranks; sizes are of the buffer on each; share: bytes / (rate x time).\n"
    )
    return rows


def _show_filled(row: verbs.Row) -> str:
    return f"{1000 * row.seconds:.1f}" if row.full is None else f"{row.full:.2f}"


def _make_kernels_table(rows: list[kernels.Row]) -> Table:
    cells = [["kernel", "ms", "x add_", "torch ms", "x faster"]]
    for row in rows:
        plain = ["", ""]
        if row.plain is not None:
            plain = [f"{1000 * row.plain:.1f}", f"{row.plain / row.seconds:.1f}"]
        ratio = f"{row.seconds / row.unit:.2f}"
        cells.append([row.name, f"{1000 * row.seconds:.2f}", ratio, *plain])
    return make_table(cells)


def _lay_out_costs(rows: list[costs.Row]) -> RenderableType:
    phases = list(rows[-1].phases)
    cells = [["in add_", "step", "wall", "reduce", *phases]]
    for row in rows:
        spent = [row.step, row.wall, *([row.reduce, *row.phases.values()] if row.phases else [])]
        figures = [f"{seconds / row.unit:.1f}" for seconds in spent]
        cells.append([row.name, *figures, *[""] * (3 + len(phases) - len(figures))])
    return lay_out(cells, None, console.width)


def _make_selectors_table(rows: list[selection.Row]) -> Table:
    cells = [["data", "selector", "found / asked", "energy sent", "ms", "x topk"]]
    exact = {row.data: row.seconds for row in rows if row.selector == selection.EXACT}
    for row in rows:
        cells.append([
            row.data, row.selector, f"{row.fewest:.2f} - {row.most:.2f}",
            f"{100 * row.energy:.1f} %", f"{1000 * row.seconds:.1f}",
            f"{row.seconds / exact[row.data]:.2f}",
        ])  # fmt: skip
    return make_table(cells, words=(0, 1))


def _make_sums_table(rows: list[collectives.Row]) -> Table:
    cells = [["one bucket", "ms", "of dense", "dense / it", "KB sent"]]
    dense = next(row for row in rows if row.name == collectives.DENSE)
    for row in rows:
        cells.append([
            row.name, f"{1000 * row.seconds:.1f}", f"{row.seconds / dense.seconds:.3f}",
            f"{dense.seconds / row.seconds:.2f}", f"{row.bytes_sent / 1024:.1f}",
        ])  # fmt: skip
    return make_table(cells)


def _make_step_table(rows: list[steps_bench.Row]) -> Table:
    cells = [["step", "ms", "x alone", "DDP / it", "KB sent", "x less", "exposed ms"]]
    alone, plain = (next(row for row in rows if row.name == name) for name in (ALONE, PLAIN))
    for row in rows:
        cells.append([
            row.name, f"{1000 * row.seconds:.1f}", f"{row.seconds / alone.seconds:.2f}",
            f"{plain.seconds / row.seconds:.2f}", f"{row.bytes_sent / 1024:.1f}",
            f"{row.bytes_dense / row.bytes_sent:.1f}" if row.bytes_sent else "",
            "" if row.exposed != row.exposed else f"{1000 * row.exposed:.1f}",
        ])  # fmt: skip
    return make_table(cells)
