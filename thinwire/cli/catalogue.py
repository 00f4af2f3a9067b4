"""`thinwire list`: every recipe with its source, composition and bytes; what exchanges cost."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from thinwire.cli.app import app, console, reported
from thinwire.cli.asked import whole
from thinwire.jobs.catalogue import JOBS
from thinwire.plan import prices, units
from thinwire.plan.costs import COSTS, Problem


@app.command("list")
def catalogue(
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
    latency: Annotated[str, typer.Option(help="Time a message takes.")] = "50us",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
) -> None:
    """Every recipe: what it is, who published it, what it sends; and what exchanges cost."""
    with reported():
        problem = Problem(d=params, k=k or max(1, params // 100), world=world, rank=rank)
        alpha, beta = units.seconds(latency), 32 / units.rate(net)
        entries = prices.catalogue(params, world, problem.k / params, rank)
    if as_json:
        typer.echo(json.dumps(_as_dict(problem, entries, alpha, beta), indent=2))
        return
    console.print(_recipes(entries))
    console.print("\nJobs for train, compare and prove:", highlight=False)
    console.print(_jobs())
    console.print(
        f"\nSent a step and worker: {params:,} parameters as {prices.SIDE} x {prices.SIDE} "
        f"matrices with biases, {world} workers, k = {problem.k:,} (density "
        f"{problem.k / params:.4g}), rank {rank}. Densities below one entry a row are "
        "rounded up by row-wise recipes. >=: counts follow the data, and more may be sent.\n"
    )
    console.print(_costs(problem, alpha, beta))
    console.print(
        f"\nOne exchange of d = {params:,} entries, {latency} a message and {net} a link: "
        "messages x alpha + words x beta. Low rank: matrices of side n = "
        f"{problem.side}."
    )


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
    table.add_column("recipe")
    table.add_column("what it is, what it is made of, where it comes from", ratio=1)
    table.add_column("KB sent", justify="right")
    table.add_column("x less", justify="right")
    for entry in entries:
        text = f"{escape(entry.summary)}\n[dim]{escape(entry.composition)}[/dim]"
        fewer = f"{entry.bytes_dense / entry.bytes:.1f}" if entry.bytes else ""
        table.add_row(
            entry.name,
            f"{text}\n[dim italic]{escape(entry.source)}[/dim italic]",
            f"{'>= ' * entry.floor}{entry.bytes / 1024:,.0f}",
            f"{'<= ' * entry.floor}{fewer}",
        )
    return table


def _costs(problem: Problem, alpha: float, beta: float) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("exchange")
    table.add_column("messages", justify="right")
    table.add_column("words", justify="right")
    table.add_column("", justify="right")
    table.add_column("ms", justify="right")
    for cost in COSTS:
        table.add_row(
            cost.name,
            cost.latency,
            cost.bandwidth,
            f"{cost.words(problem):,.0f}",
            f"{1000 * cost.seconds(problem, alpha, beta):,.2f}",
        )
    return table
