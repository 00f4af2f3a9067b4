"""Tables of recorded trainings in documents: a page per results file, and short ones inside pages.

A file of specifications names the pages, and says for each short table which runs a cell is of:

    pages = ["../results.md"]
    [lstm]
    where = { job = "lstm-lm" }
    columns = [{ head = "perplexity", show = "score" }]
    rows = [{ label = "dense", recipe = "dense()" }]

A page holds the table between `<!-- table lstm -->` and `<!-- end -->`.
"""

from __future__ import annotations

import json
import re
import statistics
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from thinwire_lab import files
from thinwire_lab.errors import Refused
from thinwire_lab.jobs.job import LOWER
from thinwire_lab.report import summary
from thinwire_lab.report.scores import headline, in_percent, saving
from thinwire_lab.runs import ledger
from thinwire_lab.runs.ledger import Line

DENSE = ("dense()", "ddp")
HEAD = """\
± is the standard deviation over the seeds, whose number is in brackets. `loss` is the training
loss near the end. `MB` is what one worker sends in the whole run, and `x less` is what dense sends
divided by that. `messages` are per step. `density` is the mean share sent. `ms` is the median step,
`s` the training time without scoring. Do not compare times on loopback: other work ran beside it.

`thinwire results --tables` writes this page. The command below prints its tables."""
PLACE = re.compile(r"(<!-- table (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def write_pages(books: Sequence[Path], folder: Path) -> None:
    """Write the tables of every results file as a page of its own.

    Args:
        books: Results files, as `thinwire compare --out` appends to them.
        folder: Where the pages go; `accuracy.jsonl` becomes `accuracy.md`.
    """
    for file in books:
        files.write(folder / f"{file.stem}.md", page_of(file))


def page_of(file: Path) -> str:
    """The tables of one results file, below the command that prints them."""
    lines = ledger.read([file])
    reach = _goal(lines)
    asked = "" if reach is None else f" --reach {reach:g}"
    command = f"thinwire results {file.name} --markdown{asked}"
    tables = summary.tables(lines, reach).items()
    shown = [f"## {title}\n\n{summary.markdown(rows)}\n" for title, rows in tables]
    return "\n".join([f"# {file.stem}\n\n{HEAD}\n\n    {command}\n", *shown])


def _goal(lines: Sequence[Line]) -> float | None:
    """What DDP ends with less a point, if some runs had links of a given rate."""
    ends = [line.outcome.figures["accuracy"] for line in lines
            if line.outcome.recipe == "ddp" and "accuracy" in line.outcome.figures]  # fmt: skip
    timed = any(line.net != "none" for line in lines)
    return round(statistics.mean(ends) - 0.01, 4) if ends and timed else None


def fill_pages(specification: Path, lines: Sequence[Line]) -> None:
    """Put the short tables into the pages that a file of specifications names."""
    for page, text in filled_pages(specification, lines).items():
        files.write(page, text)


def filled_pages(specification: Path, lines: Sequence[Line]) -> dict[Path, str]:
    """Every page with its short tables as the recorded runs have them."""
    try:
        tables = tomllib.loads(specification.read_text(encoding="utf-8"))
        pages = [specification.parent / name for name in tables.pop("pages")]
        texts = {page: page.read_text(encoding="utf-8") for page in pages}
        made = {name: _short_table(table, lines) for name, table in tables.items()}
    except (OSError, UnicodeError, tomllib.TOMLDecodeError, KeyError, TypeError) as error:
        raise Refused(f"cannot make the tables of {specification}: {error!r}") from error
    named = {match[2] for text in texts.values() for match in PLACE.finditer(text)}
    if odd := sorted(named ^ made.keys()):
        raise Refused(f"{specification} and its pages do not name the same tables: "
                      f"{', '.join(odd)}; specify what a page names, and the reverse")  # fmt: skip
    return {page: PLACE.sub(lambda match: f"{match[1]}{made[match[2]]}\n{match[3]}", text)
            for page, text in texts.items()}  # fmt: skip


def _short_table(table: Mapping[str, Any], lines: Sequence[Line]) -> str:
    columns = [dict(column) for column in table["columns"]]
    heads = [column.pop("head") for column in columns]
    rows = [[table.get("label", "recipe"), *heads], ["---"] * (1 + len(heads))]
    for row in table["rows"]:
        where = {**table["where"], **row}
        label = where.pop("label")
        cells = [_cell({**where, **column}, lines) for column in columns]
        if not any(cells):
            raise Refused(f"no run for the row {label!r}: {where}; mend `where` or the row")
        rows.append([label, *cells])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _cell(column: dict[str, Any], lines: Sequence[Line]) -> str:
    """One figure of the runs that fit, or nothing if none does."""
    show, reach = column.pop("show"), column.pop("reach", None)
    mine = [line for line in lines if _fits(line, column)]
    if not mine:
        return ""
    if show == "seconds":
        ((_, row),) = summary.tables(mine, reach).values()
        return row[-2]
    return SHOWN[show](mine, lines)


def _fits(line: Line, wanted: Mapping[str, Any]) -> bool:
    known = {**line.settings, "job": line.job, "size": line.size, "net": line.net,
             "seed": line.seed, "recipe": line.outcome.recipe,
             "steps": line.outcome.steps}  # fmt: skip
    return all(known[name] == value for name, value in wanted.items())


def _show_score(mine: Sequence[Line], _: Sequence[Line]) -> str:
    name = headline(mine[0].outcome)
    scale, unit = (100, " %") if in_percent(name) else (1, "")
    values = [scale * line.outcome.figures[name] for line in mine]
    if len(values) == 1:
        return f"{values[0]:.4g}{unit}"
    return f"{statistics.mean(values):.1f} ± {statistics.stdev(values):.1f}{unit}"


def _show_distance(mine: Sequence[Line], lines: Sequence[Line]) -> str:
    """From the best dense run of as many steps: in points, or in per cent of what has no 100 %."""
    if mine[0].outcome.recipe in DENSE:
        return ""
    name, alike = headline(mine[0].outcome), ("job", "size", "net", "workers", "data")
    groups: dict[str, list[float]] = {}
    for line in lines:
        if (line.outcome.recipe in DENSE and line.outcome.steps == mine[0].outcome.steps
                and all(getattr(line, key) == getattr(mine[0], key) for key in alike)):  # fmt: skip
            setting = json.dumps(line.settings, sort_keys=True)
            groups.setdefault(setting, []).append(line.outcome.figures[name])
    means = [statistics.mean(values) for values in groups.values()]
    dense = min(means) if name in LOWER else max(means)
    score = statistics.mean(line.outcome.figures[name] for line in mine)
    distance = 100 * (score - dense if in_percent(name) else score / dense - 1)
    return f"{round(distance, 1) + 0.0:+.1f}"


SHOWN: dict[str, Callable[[Sequence[Line], Sequence[Line]], str]] = {
    "score": _show_score,
    "saving": lambda mine, _: f"{saving([line.outcome for line in mine]):.1f}",
    "distance": _show_distance,
    "seeds": lambda mine, _: str(len({line.seed for line in mine})),
    "steps": lambda mine, _: str(mine[0].outcome.steps),
}
