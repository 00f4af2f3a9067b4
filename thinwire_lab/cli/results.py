"""`thinwire results`: the tables of what comparisons have appended to their files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from thinwire_lab.cli.app import app, console, reported
from thinwire_lab.cli.display import lay_out
from thinwire_lab.report import documents, page, style, summary
from thinwire_lab.runs import ledger


@app.command()
def results(
    file: Annotated[list[Path], typer.Argument(help="results.jsonl of one or more comparisons.")],
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown.")] = False,
    reach: Annotated[float | None, typer.Option(help="Add when this score was reached.")] = None,
    net: Annotated[str | None, typer.Option(help="Only what ran over these links.")] = None,
    draw: Annotated[Path | None, typer.Option(help="Write a picture: scores by seconds.")] = None,
    scatter: Annotated[
        Path | None, typer.Option(help="Write a picture: scores by bytes saved.")
    ] = None,
    race: Annotated[
        Path | None, typer.Option(help="Write a picture: dense, 16 bits, the soonest to --reach.")
    ] = None,
    tables: Annotated[
        Path | None, typer.Option(help="Write the tables here, a page per file.")
    ] = None,
    short: Annotated[
        Path | None, typer.Option(help="Fill the short tables that this file specifies.")
    ] = None,
) -> None:
    """Print a table per job and network; several seeds as mean and standard deviation."""
    with reported():
        for picture in filter(None, (draw, scatter, race)):
            page.possible()
            summary.check_kind(picture)
        lines = [line for line in ledger.read(file) if net in (None, line.net)]
        if not lines:
            raise ValueError(f"no run here has --net {net}; leave it out to see all")
        if tables is not None:
            documents.write_pages(file, tables)
        if short is not None:
            documents.fill_pages(short, lines)
        found = summary.tables(lines, reach)
        if draw is not None:
            style.save(summary.drawing(lines), draw)
        if scatter is not None:
            style.save(summary.scatter(lines), scatter)
        if race is not None:
            style.save(summary.race(lines, reach), race)
    for title, rows in ({} if tables or short else found).items():
        if markdown:
            console.print(f"{title}\n\n{summary.markdown(rows)}\n", markup=False,
                          highlight=False, soft_wrap=True)  # fmt: skip
        else:
            console.print(lay_out(rows, title, console.width), "")
