"""The file that comparisons append to: a line for every run that is done, so that a table can grow.

    {"job": "resnet20", ..., "seed": 0, "settings": {...}, "outcome": {...}, "scores": [{...}]}

A path is stored as its last part and a digest of what lies there: the same files on another machine
are the same data. `settings` are all others of the run, `outcome` is what `result.json` holds,
`scores` are those on the way, `versions` those of the code. Of a run that is done twice the last
line counts. A setting that a line lacks has its default.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from thinwire_lab import files
from thinwire_lab.errors import Refused
from thinwire_lab.jobs.catalogue import JOBS
from thinwire_lab.jobs.job import DEFAULTS, FAKE
from thinwire_lab.runs import logs
from thinwire_lab.runs.config import Run
from thinwire_lab.runs.loop import Outcome
from thinwire_lab.runs.versions import versions

NAME = "results.jsonl"
READ, EDGE = 1000, 1 << 16  # files that a digest looks into, and bytes at either end


@dataclass(frozen=True, kw_only=True)
class Line:
    """A run that is done, and what it gave."""

    job: str
    size: str
    workers: int
    net: str
    data: str | None
    seed: int
    settings: dict[str, Any]
    outcome: Outcome
    scores: list[dict[str, float]] = field(default_factory=list)
    checkpoint: str | None = None
    origin: str = ""  # a digest of data and checkpoint; "" if they could not be looked at
    versions: dict[str, str] = field(default_factory=dict)  # of the code; lines of old have none

    @staticmethod
    def of(run: Run, workers: int, net: str, outcome: Outcome, out: Path) -> Line:
        """Of the run in this folder."""
        wanted = {"step", "bytes_sent", "elapsed", *outcome.figures}
        by_step = {record["step"]: {key: value for key, value in record.items() if key in wanted}
                   for record in logs.read_records(out / logs.LOG)
                   if outcome.figures.keys() <= record.keys()}  # fmt: skip
        settings = json.loads(json.dumps(asdict(run.settings)))  # lists, as they will be read
        settings.pop("seed")
        names = [None if path is None else Path(path).name for path in (run.data, run.checkpoint)]
        paths = [path for path in (run.data, run.checkpoint) if path not in (None, FAKE)]
        digests = [digest(Path(str(path))) for path in paths]
        return Line(
            job=run.job, size=run.size, workers=workers, net=net, data=names[0],
            seed=run.settings.seed, settings=settings, outcome=outcome,
            scores=list(by_step.values()),
            checkpoint=names[1],
            origin="-".join(digests) if all(digests) else "",
            versions=versions(),
        )  # fmt: skip

    @cached_property
    def key(self) -> str:
        """Which run this is, whatever it gave; where two may still differ is the data."""
        which = (self.place, self.settings, self.outcome.recipe, self.seed)
        return json.dumps(which, sort_keys=True)

    def is_rerun_of(self, other: Line) -> bool:
        """Whether this is the other run, done again; data that was gone may be the other's."""
        alike = self.origin == other.origin or not (self.origin and other.origin)
        return alike and self.key == other.key

    @property
    def place(self) -> str:
        """What lines of one table have in common."""
        links = "loopback" if self.net == "none" else self.net
        data = self.data
        if data is None:  # a line may be of a job that is not here
            data = JOBS[self.job].embedded if self.job in JOBS else "embedded data"
        start = "" if self.checkpoint is None else f" from {self.checkpoint}"
        return f"{self.job}{start}, {self.size}, {data}, {self.workers} workers, {links}"


@cache
def digest(path: Path) -> str:
    """Of a file, or of all in a folder: names and sizes, and of the first ones how they begin and
    end. "" if there is nothing."""
    whole = hashlib.sha256()
    try:
        found = [path] if path.is_file() else _list_files(path)
        for number, one in enumerate(found):
            size = one.stat().st_size
            whole.update(f"{one.relative_to(path.parent).as_posix()} {size}\n".encode())
            if number < READ:
                with one.open("rb") as file:
                    whole.update(file.read(EDGE))
                    file.seek(max(0, size - EDGE))
                    whole.update(file.read(EDGE))
    except OSError:
        return ""
    return whole.hexdigest()[:8] if found else ""


def _list_files(folder: Path) -> list[Path]:
    """All below it, but for what desktops and editors hide there."""
    return sorted(
        Path(where, name)
        for where, _, names in os.walk(folder)
        for name in names
        if not name.startswith(".")
    )


def append(path: Path, line: Line) -> None:
    """Add a line after the last whole one: all of it or nothing."""
    text = (json.dumps(files.nan_to_null(asdict(line))) + "\n").encode()
    with files.explain_errors(f"write {path}"), path.open("ab+", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        if size and file.read(1) != b"\n":  # of a process that was killed here
            text = b"\n" + text
        files.append(file, text)


def complete(path: Path, line: Line) -> None:
    """Append the line if the process that has run it was killed before it could.

    A line in the middle of which a process was killed is none.
    """
    for number, text in enumerate(_read_lines(path) if path.exists() else (), 1):
        with contextlib.suppress(Refused):
            if line.is_rerun_of(_parse(text, path, number)):
                return
    append(path, line)


def read(paths: Sequence[Path]) -> list[Line]:
    """Every run once, in the order in which they were first done."""
    found: list[Line] = []
    for path in paths:
        for number, text in enumerate(_read_lines(path), 1):
            if text.strip():
                _put(_parse(text, path, number), found)
    if not found:
        raise Refused(f"{', '.join(map(str, paths))} hold no result yet; compare something first")
    return found


def _put(line: Line, found: list[Line]) -> None:
    """In the place of the same run, or behind all others."""
    for place, other in enumerate(found):
        if line.is_rerun_of(other):
            found[place] = line if line.origin else replace(line, origin=other.origin)
            return
    found.append(line)


def _read_lines(path: Path) -> list[str]:
    try:
        with files.explain_errors(f"read {path}"):
            return path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise Refused(f"{path} is no text; give a results.jsonl of a comparison") from None


def _parse(text: str, path: Path, number: int) -> Line:
    try:
        values = json.loads(text)
        outcome = Outcome(**files.null_to_nan(values["outcome"]))
        missing = {"bytes_sent", "bytes_dense", "density", "steps"} - outcome.metrics.keys()
        if missing:
            raise ValueError(f"its metrics lack {', '.join(sorted(missing))}")
        drawn = {"step", "elapsed", "bytes_sent", *list(outcome.figures)[:1]}
        scores = [s for s in files.null_to_nan(values["scores"]) if drawn <= s.keys()]
        settings = json.loads(json.dumps(DEFAULTS)) | values["settings"]
        settings.pop("seed", None)
        return Line(**values | {"outcome": outcome, "scores": scores, "settings": settings})
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise Refused(f"line {number} of {path} is no result ({error}); remove that line") from None
