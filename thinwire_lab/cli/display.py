"""How runs look in a terminal: their bars, and tables that fit its width."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from rich import progress
from rich.console import Console, RenderableType
from rich.console import Group as Lines
from rich.markup import escape
from rich.table import Table
from rich.text import Text


def make_bars(on: Console, disable: bool = False) -> progress.Progress:
    """A recipe, its bar, steps, time left and a note; where room is scarce, figures have it."""
    name, bar = ("{task.description:.28}", 20) if on.width >= 120 else ("{task.description:.10}", 5)
    return progress.Progress(
        progress.TextColumn(name, markup=False), progress.BarColumn(bar_width=bar),
        progress.MofNCompleteColumn(), progress.TimeRemainingColumn(compact=True),
        progress.TextColumn("{task.fields[note]}"), console=on, disable=disable,
    )  # fmt: skip


def lay_out(rows: list[list[str]], title: str | None, width: int) -> RenderableType:
    """Rows, of which the first is the head, for a terminal. Brackets of recipes are no markup.

    Where recipes would leave figures no room, numbers stand for them, and they below the table;
    columns that still find none stand below the others.
    """
    head, *rest = rows
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    below = []
    if widths[0] + sum(2 + wide for wide in widths[1:]) > width:
        below = [f"{n}  {call}" for n, (call, *_) in enumerate(rest, 1)]
        rest = [[str(n), *cells] for n, (_, *cells) in enumerate(rest, 1)]
        widths[0] = len(head[0])
    blocks = _split_columns(widths, width)
    tables = [make_table([row[c] for c in block] for row in (head, *rest)) for block in blocks]
    tables[0].title = None if title is None else escape(title)
    return Lines(*tables, *map(Text, below))


def _split_columns(widths: list[int], room: int) -> list[list[int]]:
    """Columns, as many beside the first as there is room for, in as many tables as it takes."""
    blocks = [[0]]
    for column in range(1, len(widths)):
        beside = sum(2 + widths[c] for c in blocks[-1])
        if len(blocks[-1]) > 1 and beside + widths[column] > room:
            blocks.append([0])
        blocks[-1].append(column)
    return blocks


def make_table(
    rows: Iterable[Sequence[str]], words: Collection[int] = (0,), framed: str | None = None
) -> Table:
    """Rows below a head: columns of words stand on the left, of figures on the right. A frame goes
    round a table that has its title there."""
    head, *rest = rows
    plain = Table(box=None, pad_edge=False, title_justify="left")
    table = plain if framed is None else Table(title=framed)
    for number, name in enumerate(head):
        table.add_column(name, justify="left" if number in words else "right", overflow="fold")
    for row in rest:
        table.add_row(*map(escape, row))
    return table
