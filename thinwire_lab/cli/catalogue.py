"""`thinwire list`: every recipe on one screen, one recipe in full, and what exchanges cost."""

from __future__ import annotations

import json
from dataclasses import asdict
from textwrap import fill
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from thinwire.describe import spell
from thinwire.plan import prices, units
from thinwire.recipes import UnknownRecipe
from thinwire_lab.cli.app import app, console, reported
from thinwire_lab.cli.display import make_table
from thinwire_lab.cli.options import whole
from thinwire_lab.jobs.catalogue import JOBS
from thinwire_lab.simulate.costs import COSTS, Problem


@app.command("list")
def catalogue(
    name: Annotated[str | None, typer.Argument(help="Show all about this recipe.")] = None,
    params: Annotated[
        int, typer.Option(parser=whole(1), help="Parameters of the model.")
    ] = 25_000_000,
    world: Annotated[int, typer.Option(min=1, help="Workers.")] = 4,
    k: Annotated[
        int | None,
        typer.Option("--k", parser=whole(1), help="Entries kept; 1 % of the parameters if unset."),
    ] = None,
    rank: Annotated[int, typer.Option(min=1, help="Columns of a low-rank factor.")] = 4,
    net: Annotated[str, typer.Option(help="Rate of a link.")] = "1gbit",
    latency: Annotated[str, typer.Option(help="Time per message.")] = "50us",
    costs: Annotated[bool, typer.Option("--costs", help="Cost of exchanges instead.")] = False,
    jobs: Annotated[bool, typer.Option("--jobs", help="Jobs to train instead.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
) -> None:
    """List recipes and what they send, or show one recipe with its options."""
    with reported():
        problem = Problem(d=params, k=k or max(1, params // 100), world=world, rank=rank)
        alpha, beta = units.seconds(latency), 32 / units.rate(net)
        entries = {e.name: e for e in prices.catalogue(params, world, problem.k / params, rank)}
        if name is not None and name not in entries:
            raise UnknownRecipe(name)
    if as_json:
        listed = [entries[name]] if name else list(entries.values())
        found = _as_dict(problem, listed, alpha, beta)
        typer.echo(json.dumps(found, indent=2, default=spell))
    elif name:
        _show_recipe(entries[name])
        console.print(
            f"\nBytes\n{_count_fewer(entries[name])} {_name_problem(problem)}", highlight=False
        )
    elif costs:
        _show_costs(problem, alpha, beta, net, latency)
    elif jobs:
        console.print(_jobs())
    else:
        console.print(_recipes(list(entries.values())))
        console.print(f"\nFewer bytes {_name_problem(problem)}", highlight=False)
        console.print(
            "<=: more may be sent, as counts follow the data.\n"
            "thinwire list NAME shows options. --costs shows exchanges, --jobs what to train.",
            highlight=False,
        )


def _name_problem(problem: Problem) -> str:
    return (
        f"than dense: {problem.d:,} parameters, {problem.world} workers, "
        f"density {problem.k / problem.d:.4g}, rank {problem.rank}."
    )


def _count_fewer(entry: prices.Entry) -> str:
    fewer = entry.bytes_dense / entry.bytes if entry.bytes else 1.0
    return f"{'<= ' * entry.floor}{fewer:.1f} times fewer"


def _show_recipe(entry: prices.Entry) -> None:
    """One recipe: what it is, how to write it, every option, what it is made of."""
    wide = min(console.width, 100)
    options = Table(box=None, pad_edge=False, width=wide, show_header=False)
    options.add_column(no_wrap=True)
    options.add_column(ratio=1)
    for option in entry.options:
        typed = Text(f"{option.name}={spell(option.default)}")
        options.add_row(typed, Text(f"{option.meaning} ({option.type})"))
    console.print(Text(fill(f"{entry.name}: {entry.summary} {entry.text}", wide)))
    if entry.options:
        console.print("\nOptions and defaults", options, sep="\n")
    parts = {"Example": entry.example, "Made of": entry.composition, "Source": entry.source}
    for title, text in parts.items():
        console.print(Text(f"\n{title}\n{fill(text, wide)}"))


def _jobs() -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    for name, job in JOBS.items():
        table.add_row(name, job.about)
    return table


def _as_dict(
    problem: Problem, entries: list[prices.Entry], alpha: float, beta: float
) -> dict[str, object]:
    return {
        **asdict(problem),
        "alpha": alpha,
        "beta": beta,
        "jobs": {name: job.about for name, job in JOBS.items()},
        "recipes": [asdict(entry) for entry in entries],
        "costs": [
            {
                "name": cost.name,
                "latency": cost.latency,
                "bandwidth": cost.bandwidth,
                "messages": cost.messages(problem),
                "words": cost.words(problem),
                "seconds": cost.seconds(problem, alpha, beta),
            }
            for cost in COSTS
        ],
    }


def _recipes(entries: list[prices.Entry]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("recipe", no_wrap=True)
    table.add_column("what it is", no_wrap=True, ratio=1)
    table.add_column("x fewer", justify="right", no_wrap=True)
    for entry in entries:
        fewer = f"{entry.bytes_dense / entry.bytes:.1f}" if entry.bytes else ""
        table.add_row(entry.name, Text(entry.summary), f"{'<= ' * entry.floor}{fewer}")
    return table


def _show_costs(problem: Problem, alpha: float, beta: float, net: str, latency: str) -> None:
    console.print(_make_costs_table(problem, alpha, beta))
    console.print(
        f"\nOne exchange of d = {problem.d:,} entries, k = {problem.k:,} kept, {problem.world} "
        f"workers, {latency} per message and {net} per link: messages x alpha + words x beta. "
        f"Low rank: matrices of side n = {problem.side}."
    )


def _make_costs_table(problem: Problem, alpha: float, beta: float) -> Table:
    rows = [["exchange", "messages", "words", "", "ms"]]
    for cost in COSTS:
        seconds = cost.seconds(problem, alpha, beta)
        figures = [f"{cost.words(problem):,.0f}", f"{1000 * seconds:,.2f}"]
        rows.append([cost.name, cost.latency, cost.bandwidth, *figures])
    return make_table(rows)
