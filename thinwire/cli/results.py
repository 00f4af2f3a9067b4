"""`thinwire results`: the tables of what comparisons have appended to their files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from thinwire.cli.app import app, console, reported
from thinwire.cli.display import shown
from thinwire.jobs import ledger
from thinwire.report import grown, page


@app.command()
def results(
    file: Annotated[list[Path], typer.Argument(help="results.jsonl of one comparison or more.")],
    markdown: Annotated[bool, typer.Option("--markdown", help="As a document has it.")] = False,
    reach: Annotated[float | None, typer.Option(help="Tell when this score was reached.")] = None,
    draw: Annotated[Path | None, typer.Option(help="A picture of the scores on their way.")] = None,
    scatter: Annotated[Path | None, typer.Option(help="A picture: scores by bytes.")] = None,
) -> None:
    """Print a table for every job and network; several seeds as mean and deviation."""
    with reported():
        for picture in (draw, scatter):
            if picture is not None:
                page.possible()
                grown.check_kind(picture)
        lines = ledger.read(file)
        tables = grown.tables(lines, reach)
        if draw is not None:
            grown.draw(grown.drawing(lines), draw)
        if scatter is not None:
            grown.draw(grown.scatter(lines), scatter)
    for title, rows in tables.items():
        if markdown:
            console.print(f"{title}\n\n{grown.markdown(rows)}\n", markup=False,
                          highlight=False, soft_wrap=True)  # fmt: skip
        else:
            console.print(shown(rows, title, console.width), "")
