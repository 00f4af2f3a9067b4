"""`thinwire trace`: every message of a recipe, as tables here and as files."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress
from rich.table import Table

from thinwire_lab import files
from thinwire_lab.cli.app import app, console, reported
from thinwire_lab.cli.display import make_table
from thinwire_lab.cli.options import whole
from thinwire_lab.trace import patterns, record

SHOWN = 16  # ranks of a matrix that fit on a screen


@app.command()
def trace(
    recipe: Annotated[str, typer.Option(help="Recipe, as a call.")] = "slots(density=0.01)",
    workers: Annotated[int, typer.Option(min=1, max=64, help="Local worker processes.")] = 4,
    net: Annotated[str, typer.Option(help="Rate of each link, as 1gbit.")] = "none",
    params: Annotated[int, typer.Option(parser=whole(100), help="Model parameters.")] = 1_000_000,
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 20,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for CSV, JSON, a Chrome trace and a picture."),
    ] = None,
) -> None:
    """Record every message of a recipe: who sends what to whom, in real processes."""
    setting = record.Setting(call=recipe, world=workers, params=params, steps=steps, net=net)
    with reported():
        if out is not None:
            _make_folder(out)
        with Progress(console=console, transient=True) as progress:
            task = progress.add_task("tracing", total=steps)
            found = record.record(setting, lambda step: progress.update(task, completed=step))
    where = "loopback" if net == "none" else f"links of {net}"
    console.print(
        f"{recipe}, {found.params:,} parameters, {workers} workers on {where}, {steps} steps; a "
        f"message takes {1e6 * found.alpha:.0f} us and {_format_rate(found.beta)}",
        highlight=False,
    )
    console.print(_matrix(found))
    console.print(_phases(found))
    console.print(_sizes(found))
    console.print(_predictions(found))
    if out is not None:
        with reported():
            console.print(f"in {out}: {', '.join(_write_files(found, out))}", highlight=False)


def _format_rate(beta: float) -> str:
    return f"{8 / beta / 1e6:,.0f} Mbit/s" if beta > 0 else "no time for its bytes"


def _matrix(found: record.Trace) -> Table:
    world = min(SHOWN, found.setting.world)
    rows = [["rank", *map(str, range(world)), "all"]]
    for rank, row in enumerate(patterns.matrix(found)[:world]):
        cells = [f"{size / 1e3:.1f}" if size else "." for size in row[:world]]
        rows.append([str(rank), *cells, f"{sum(row) / 1e3:.1f}"])
    return make_table(rows, words=(), framed="KB per step, from (row) to (column)")


def _phases(found: record.Trace) -> Table:
    rows = [["phase", "verb", "steps", "calls", "KB", "max/mean", "ms"]]
    for phase in patterns.phases(found):
        rows.append([
            phase.name, phase.verb, str(phase.steps), f"{phase.calls:.1f}",
            f"{phase.bytes / 1e3:.2f}", f"{phase.imbalance:.2f}", f"{1e3 * phase.seconds:.2f}",
        ])  # fmt: skip
    return make_table(rows, words=(0, 1), framed="phases, over the steps that had them")


def _sizes(found: record.Trace) -> Table:
    counted = patterns.sizes(found)
    most = max((count for _, count in counted), default=1)
    rows = [["bytes up to", "messages", ""]]
    rows += [[f"{n:,}", str(count), "#" * round(30 * count / most)] for n, count in counted]
    return make_table(rows, words=(2,), framed="messages by size")


def _predictions(found: record.Trace) -> Table:
    rows = [["", "predicted", "measured"]]
    for row in patterns.predictions(found):
        if row.what == "seconds":
            rows.append(["ms", f"{1e3 * row.predicted:.2f}", f"{1e3 * row.measured:.2f}"])
            rows.append(["ms, waiting included", "", f"{1e3 * patterns.waiting(found):.2f}"])
        else:
            rows.append([row.what, f"{row.predicted:,.1f}", f"{row.measured:,.1f}"])
    return make_table(rows, words=(), framed="a step of the busiest rank")


def _make_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--out {out} cannot be made ({error}); name another folder") from None


def _write_files(found: record.Trace, out: Path) -> list[str]:
    """Each file whole or not at all."""
    texts = {
        "trace.csv": patterns.as_csv(found),
        "trace.json": patterns.as_json(found),
        "chrome.json": patterns.as_chrome(found),
    }
    for name, text in texts.items():
        files.write(out / name, text)
    if importlib.util.find_spec("matplotlib") is None:
        return [*texts, "no pattern.png (pip install 'thinwire[plots]')"]
    from thinwire_lab.report.trace import draw

    draw(found, out / "pattern.png")
    return [*texts, "pattern.png"]
