"""`thinwire plan`: will it help me, which one, and why."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import Progress
from rich.table import Table

from thinwire.cli.app import app, console, reported
from thinwire.jobs.versions import versions
from thinwire.lab import planning
from thinwire.lab import verify as check
from thinwire.plan import network, planner
from thinwire.plan import papers as published
from thinwire.plan.network import Network
from thinwire.plan.planner import DENSE, Option, Setup
from thinwire.report import planned

RECIPES = (
    "bf16()", "topk(density=0.01)", "adtopk(density=0.01)", "slots(density=0.01)",
    "acpsgd(rank=4)", "powersgd(rank=4)",
)  # fmt: skip
LOCAL = 8  # workers started here at most; a larger world is worked out from these


@app.command()
def plan(
    context: typer.Context,
    model: Annotated[
        str | None, typer.Argument(help="mlp, vgg16, small, conv, a job, or module:function.")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, max=65_536, help="How many.")] = 4,
    net: Annotated[str | None, typer.Option(help="Links of a rate, as 10gbit.")] = None,
    latency: Annotated[
        str | None, typer.Option(help="Of a message, with --net; 50us by default.")
    ] = None,
    probe: Annotated[Path | None, typer.Option(help="A probe that --out has saved.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Examples a worker.")] = 16,
    recipe: Annotated[list[str] | None, typer.Option(help="A recipe call; repeatable.")] = None,
    bucket_mb: Annotated[float, typer.Option(min=0.01, help="DDP's fusion threshold.")] = 25.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="Write plan.json, probe.json, plan.html.")
    ] = None,
    verify: Annotated[bool, typer.Option(help="Predict and measure, in shaped networks.")] = False,
    papers: Annotated[bool, typer.Option(help="Published speed-ups beside our model's.")] = False,
) -> None:
    """Whether compression pays on your model and network, which recipe, and why.

    Without --net and --probe the links of local workers, or of the group that torchrun has started,
    are measured; with them every worker is taken to have a machine like this one.
    """
    with reported():
        _check_alone(context)
    if papers:
        _papers()
        return
    if verify:
        _verify((out or Path()) / "verify.jsonl", batch)
        return
    with reported():
        if model is None:
            raise ValueError(
                "which model? give mlp, vgg16, small, conv, a job as resnet50, or module:function"
            )
        links = _links(net, latency, probe, workers)
        _folder(out)
        calls = tuple(dict.fromkeys((DENSE, *(recipe or RECIPES))))
        question = planning.Question(
            model=model, batch=batch, recipes=calls, bucket_mb=bucket_mb, probe=links is None
        )
        found = _found(question, workers)
    if planning.launched() and os.environ.get("RANK") != "0":
        return
    setup, costs = _setup(found, links, workers)
    options = planner.ranked(setup, costs)
    _say(options, setup, costs, as_json)
    if out is not None:
        with reported():
            _save(out, f"{model}, batch {batch}, {workers} workers", setup, costs, options)


def _check_alone(context: typer.Context) -> None:
    """These two answer for models and networks of their own, and would ignore most flags."""
    given = [
        name
        for name in sorted(context.params)
        if str(context.get_parameter_source(name)).endswith("COMMANDLINE")
    ]
    for alone, heeded in (("papers", set()), ("verify", {"batch", "out"})):
        ignored = [name for name in given if name not in {alone, *heeded}]
        if alone in given and ignored:
            flags = ", ".join(_flag(name) for name in ignored)
            takes = " and ".join(_flag(name) for name in sorted(heeded)) or "no other flag"
            raise ValueError(
                f"--{alone} has models, networks and recipes of its own and takes {takes}; leave "
                f"out {flags}"
            )


def _flag(name: str) -> str:
    if name == "model":
        return "the model"
    return "--json" if name == "as_json" else "--" + name.replace("_", "-")


def _links(
    net: str | None, latency: str | None, probe: Path | None, workers: int
) -> Network | None:
    if latency is not None and net is None:
        raise ValueError(f"--latency says what links of --net are like, got {latency} alone")
    if net is not None and probe is not None:
        raise ValueError("give --net or --probe, not both: each says what the links are like")
    if net is not None:
        return network.given(net, latency or "50us", workers)
    return network.loaded(probe).at(workers) if probe is not None else None


def _folder(out: Path | None) -> None:
    if out is not None:
        try:
            out.mkdir(parents=True, exist_ok=True)
            (out / ".part").write_bytes(b"")
            (out / ".part").unlink()
        except OSError as error:
            raise ValueError(f"cannot write into {out}: {error.strerror}") from None


def _found(question: planning.Question, workers: int) -> planning.Profiled:
    local = workers if question.probe else min(workers, LOCAL, max(2, os.cpu_count() or 1))
    if local > LOCAL:
        raise ValueError(
            f"measuring the links of {workers} workers on this machine makes no sense; start them "
            "with torchrun, or say what the links are like with --net or --probe"
        )
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("measuring", total=2 + len(question.recipes))
        return planning.profiled(question, local, lambda message: progress.advance(task))


def _setup(
    found: planning.Profiled, links: Network | None, workers: int
) -> tuple[Setup, dict[str, list[Any]]]:
    cores = float(os.cpu_count() or 1)
    if links is None:
        assert found.links is not None
        here = os.environ.get("LOCAL_WORLD_SIZE", "1") if planning.launched() else found.world
        shared = int(here)  # those on one machine share it
        return found.setup(found.links, cores / shared), found.costs
    costs = {
        call: planner.moved(call, found.model, found.groups, each, workers, found.world)
        for call, each in found.costs.items()
    }
    return found.setup(links, cores), costs


def _say(options: list[Option], setup: Setup, costs: dict[str, list[Any]], as_json: bool) -> None:
    dense = next(option for option in options if option.recipe == DENSE)
    best = planner.chosen(options)
    if as_json:
        console.print_json(json.dumps(_figures(options, setup)))
        return
    rows = planned.table(options, dense)
    shown = Table(box=None, pad_edge=False)
    for number, column in enumerate(rows[0]):
        shown.add_column(column, justify="right" if number else "left", no_wrap=number == 0)
    for row in rows[1:]:
        shown.add_row(*row, style="bold" if row[0] == best.recipe else None)
    console.print(shown)
    alone = setup.model.alone / min(1.0, setup.cores)
    console.print(
        f"{setup.model.numel:,} parameters in {len(setup.groups)} buckets, {setup.network.world} "
        f"workers, links {setup.network.source}; a step that sends nothing takes "
        f"{1e3 * alone:.1f} ms."
    )
    console.print(f"[bold]{planner.verdict(options)}[/bold]")
    for line in planner.reasons(best, dense) if best is not dense else []:
        console.print(f"  {line}", highlight=False)
    name, counts, seconds = planner.buffered(best.recipe, setup, costs[best.recipe])[0]
    if seconds < 0.97 * best.step:
        console.print(
            f"Other buckets would help: {name}, {1e3 * seconds:.1f} ms; with distribute, "
            f"buckets={counts}", highlight=False,
        )  # fmt: skip


def _figures(options: list[Option], setup: Setup) -> dict[str, Any]:
    dense = next(option for option in options if option.recipe == DENSE)
    return {
        "format": "thinwire plan 1",
        "versions": versions(),
        "verdict": planner.verdict(options),
        "recipe": planner.chosen(options).recipe,
        "workers": setup.network.world,
        "links": setup.network.source,
        "cores": setup.cores,
        "parameters": setup.model.numel,
        "buckets": [list(group) for group in setup.groups],
        "options": [
            {
                "recipe": option.recipe,
                "seconds": option.step,
                "speed_up": dense.step / option.step,
                "exposed": option.timeline.exposed,
                "bytes": option.sent,
                "bytes_floor": option.floor,
                "memory": option.memory,
                "crossover": option.crossover if math.isfinite(option.crossover) else None,
            }
            for option in options
        ],
    }


def _save(
    out: Path, title: str, setup: Setup, costs: dict[str, list[Any]], options: list[Option]
) -> None:
    from thinwire.report import page

    try:
        (out / "plan.json").write_text(json.dumps(_figures(options, setup), indent=1) + "\n")
        network.saved(setup.network, out / "probe.json")
        page.write(planned.page(f"A plan for {title}", setup, costs, options), out / "plan.html")
    except OSError as error:
        raise ValueError(f"cannot write into {out}: {error.strerror}") from None
    console.print(f"Written: {out / 'plan.html'}, plan.json, probe.json")


def _verify(path: Path, batch: int) -> None:
    with reported():
        _folder(path.parent)
        cells = check.verify(path, batch, on_cell=_show)
        score = check.score(cells)
    console.print(
        f"{len(cells)} cells: median error {100 * score.error:.1f} %; the right recipe, or one "
        f"within a tenth of it, in {score.right} of {score.places} places; auto took at most "
        f"{score.auto:.2f} times the best recipe's step."
    )


def _papers() -> None:
    for claim, theirs, ours, why in published.rows()[1:]:
        console.print(f"{claim}: published {theirs}, ours {ours}", highlight=False)
        if why:
            console.print(f"    {why}", highlight=False)


def _show(cell: check.Cell) -> None:
    console.print(
        f"{cell.model:6} {cell.workers} workers {cell.net:>8}  {cell.recipe:22} predicted "
        f"{1e3 * cell.predicted:8.1f} ms, measured {1e3 * cell.measured:8.1f} ms "
        f"({100 * (cell.predicted / cell.measured - 1):+.0f} %)",
        highlight=False, soft_wrap=True,
    )  # fmt: skip
