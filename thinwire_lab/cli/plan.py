"""`thinwire plan`: will it help me, which one, and why."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.progress import Progress

from thinwire import evidence
from thinwire.plan import network as networks
from thinwire.plan import planner
from thinwire.plan.network import Network
from thinwire.plan.planner import DENSE, Option, Setup
from thinwire_lab import files
from thinwire_lab.bench import measure
from thinwire_lab.bench import verify as check
from thinwire_lab.cli.app import app, console, reported
from thinwire_lab.cli.display import lay_out
from thinwire_lab.jobs.catalogue import JOBS
from thinwire_lab.report import advice
from thinwire_lab.runs.versions import versions
from thinwire_lab.simulate import papers as published

LOCAL = 8  # workers started here at most; a larger world is worked out from these
FAMILIES = ("sgd", "adam")
Optimizer = Annotated[
    str | None,
    typer.Option(help="sgd or adam: whose recorded costs count. The job's; else the worst of all."),
]
Tolerance = Annotated[
    float, typer.Option(min=0.0, help="Percent of accuracy that the advice may cost.")
]
Steps = Annotated[
    int, typer.Option(min=4, help="Of the training: schedules are averaged over them.")
]
Shared = Annotated[
    bool, typer.Option("--shared-machine", help="All workers share this machine's cores.")
]


@app.command()
def plan(
    context: typer.Context,
    model: Annotated[
        str | None, typer.Argument(help="mlp, vgg16, small, conv, a job, or module:function.")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, max=65_536, help="How many.")] = 4,
    net: Annotated[str | None, typer.Option(help="Links of a rate, as 10gbit.")] = None,
    latency: Annotated[
        str | None, typer.Option(help="Per message, with --net; 50us by default.")
    ] = None,
    probe: Annotated[Path | None, typer.Option(help="A probe that --out has saved.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Examples per worker.")] = 16,
    recipe: Annotated[list[str] | None, typer.Option(help="A recipe call; repeatable.")] = None,
    optimizer: Optimizer = None,
    tolerance: Tolerance = 1.0,
    steps: Steps = 1000,
    shared_machine: Shared = False,
    bucket_mb: Annotated[float, typer.Option(min=0.01, help="DDP's fusion threshold.")] = 25.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="Write plan.json, probe.json, plan.html.")
    ] = None,
    verify: Annotated[bool, typer.Option(help="Predict and measure, in shaped networks.")] = False,
    papers: Annotated[bool, typer.Option(help="Published speed-ups beside our model's.")] = False,
) -> None:
    """Whether compression pays on your model and network, which recipe, why, and what it costs.

    Without --net and --probe the links of local workers, or of the group that torchrun has started,
    are measured. With them every worker has a machine like this one, unless --shared-machine says
    that all run on this one. A recipe is recommended only if recorded trainings kept accuracy.
    """
    with reported():
        _check_alone(context)
    if papers or verify:
        _papers() if papers else _verify((out or Path()) / "verify.jsonl", batch)
        return
    with reported():
        name, family = _named(model), _family(model, optimizer)
        links = _links(net, latency, probe, workers)
        _folder(out)
        calls = tuple(dict.fromkeys((DENSE, *(recipe or measure.candidates(steps)))))
        found = _found(measure.Question(
            model=name, batch=batch, recipes=calls, bucket_mb=bucket_mb, probe=links is None,
            steps=steps, adam=family == "adam",
        ), workers)  # fmt: skip
    if measure.launched() and os.environ.get("RANK") != "0":
        return
    network = links or found.links
    assert network is not None, "links that are not given are measured"
    setup = replace(
        found.setup(network, _cores(network.world, links is None, shared_machine)),
        steps=steps, optimizer=family, tolerance=tolerance,
    )  # fmt: skip
    costs = {call: planner.move(call, setup, each, found.world)
             for call, each in found.costs.items()}  # fmt: skip
    options = planner.rank(setup, costs)
    _say(options, setup, costs, as_json)
    if out is not None:
        with reported():
            _save(out, f"{model}, batch {batch}, {workers} workers", setup, costs, options)


def _named(model: str | None) -> str:
    if model is None:
        raise ValueError(
            "which model? give mlp, vgg16, small, conv, a job as resnet50, or module:function"
        )
    return model


def _family(model: str | None, asked: str | None) -> str | None:
    """The optimizers whose recorded trainings count: those asked for, or that of the job."""
    if asked is not None and asked not in FAMILIES:
        raise ValueError(f"--optimizer is {' or '.join(FAMILIES)}, got {asked!r}")
    if asked is None and model in JOBS:
        return evidence.family(JOBS[model].sizes["paper"].optimizer)
    return asked


def _cores(world: int, probed: bool, shared: bool) -> float:
    """Cores per worker: those on one machine share it, as local workers do."""
    launched = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if measure.launched() else world
    here = world if shared else launched if probed else 1
    return float(os.cpu_count() or 1) / here


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
        return networks.from_rate(net, latency or "50us", workers)
    return networks.load(probe).at(workers) if probe is not None else None


def _folder(out: Path | None) -> None:
    if out is not None:
        with files.explain_errors(f"write into {out}"):
            out.mkdir(parents=True, exist_ok=True)
            (out / ".part").write_bytes(b"")
            (out / ".part").unlink()


def _found(question: measure.Question, workers: int) -> measure.Profiled:
    local = workers if question.probe else min(workers, LOCAL, max(2, os.cpu_count() or 1))
    if local > LOCAL:
        raise ValueError(
            f"measuring the links of {workers} workers on this machine makes no sense; start them "
            "with torchrun, or say what the links are like with --net or --probe"
        )
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("measuring", total=2 + len(question.recipes))
        return measure.ask(question, local, lambda message: progress.advance(task))


def _say(options: list[Option], setup: Setup, costs: dict[str, list[Any]], as_json: bool) -> None:
    if as_json:
        console.print_json(json.dumps(_figures(options, setup)))
        return
    for title, rows in advice.tables(options, setup).items():
        console.print(lay_out(rows, title, console.width), "")
    dense = next(option for option in options if option.recipe == DENSE)
    best = planner.choose(options)
    alone = setup.model.alone / min(1.0, setup.cores)
    console.print(
        f"{setup.model.numel:,} parameters in {len(setup.groups)} buckets, {setup.network.world} "
        f"workers, links {setup.network.source}, {setup.cores:.2g} cores per worker; a step that "
        f"sends nothing takes {1e3 * alone:.1f} ms."
    )
    console.print(f"[bold]{escape(planner.verdict(options, setup))}[/bold]")
    for line in planner.reasons(best, dense) if best is not dense else []:
        console.print(f"  {line}", highlight=False)
    name, counts, seconds = planner.plan_buffers(best.recipe, setup, costs[best.recipe])[0]
    if seconds < 0.97 * best.step:
        console.print(
            f"Other buckets would help: {name}, {1e3 * seconds:.1f} ms; with distribute, "
            f"buckets={counts}", highlight=False,
        )  # fmt: skip


def _figures(options: list[Option], setup: Setup) -> dict[str, Any]:
    dense = next(option for option in options if option.recipe == DENSE)
    return {
        "format": "thinwire plan 2",
        "versions": versions(),
        "verdict": planner.verdict(options, setup),
        "recipe": planner.choose(options).recipe,
        "workers": setup.network.world,
        "links": setup.network.source,
        "cores": setup.cores,
        "parameters": setup.model.numel,
        "optimizer": setup.optimizer,
        "tolerance": setup.tolerance,
        "steps": setup.steps,
        "buckets": [list(group) for group in setup.groups],
        "options": [_figures_of(option, dense) for option in options],
    }


def _figures_of(option: Option, dense: Option) -> dict[str, Any]:
    return {
        "recipe": option.recipe,
        "seconds": option.step,
        "speed_up": float(f"{dense.step / option.step:.2g}"),
        "keeps_accuracy": option.keeps,
        "cost": 0.0 if option is dense else option.worst and _finite(option.worst.cost),
        "evidence": [
            asdict(trial) | {"cost": _finite(trial.cost)}
            for trial in sorted(option.trials, key=lambda trial: -trial.cost)
        ],
        "exposed": option.timeline.exposed,
        "bytes": option.sent,
        "bytes_floor": option.floor,
        "memory": option.memory,
        "crossover": _finite(option.crossover),
    }


def _finite(number: float) -> float | None:
    """As JSON has it."""
    return number if math.isfinite(number) else None


def _save(
    out: Path, title: str, setup: Setup, costs: dict[str, list[Any]], options: list[Option]
) -> None:
    from thinwire_lab.report import page

    with files.explain_errors(f"write into {out}"):
        (out / "plan.json").write_text(json.dumps(_figures(options, setup), indent=1) + "\n")
        networks.save(setup.network, out / "probe.json")
        page.write(advice.page(f"A plan for {title}", setup, costs, options), out / "plan.html")
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
