"""One training, whole: what `config.toml` holds, what is printed at the start."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from thinwire import recipes
from thinwire.plan import units
from thinwire.protocols import Reducer
from thinwire.spelling import meant
from thinwire_lab.jobs.catalogue import find
from thinwire_lab.jobs.job import SIZES, Settings, Source, make_settings
from thinwire_lab.runs.baselines import HALF, PLAIN, POWER

BASELINES = {"ddp": PLAIN, "fp16-hook": HALF, "powersgd-hook": POWER}  # PyTorch's own, for compare
OWN = ("mlp", "mnist", "resnet20", "vgg16", "lstm-lm", "lstm-wiki", "lstm-an4")  # networks of ours
_KINDS = {"job": str, "size": str, "recipe": str, "data": str, "checkpoint": str, "net": str,
          "workers": int, "settings": dict}  # fmt: skip
_KIND_NAMES = {str: "a string", int: "a whole number", dict: "a table"}
MOST_WORKERS = 250  # on one machine


@dataclass(frozen=True, kw_only=True)
class Run:
    """A job at a size, with a recipe, on some data, by so many workers over such links."""

    job: str
    size: str = "tiny"
    recipe: str = "dense()"
    settings: Settings
    data: str | None = None
    checkpoint: str | None = None
    workers: int | None = None  # as many as there are
    net: str = "none"

    def source(self) -> Source:
        checkpoint = None if self.checkpoint is None else Path(self.checkpoint)
        return Source(data=self.data, checkpoint=checkpoint, length=self.settings.length)

    @property
    def material(self) -> str:
        """The data it trains on, by name where none was given."""
        return find(self.job).embedded if self.data is None else self.data

    def reducer(self) -> Reducer | None:
        """None for what PyTorch does by itself."""
        return None if self.recipe in BASELINES else recipes.parse(self.recipe)


def check_table(values: dict[str, Any]) -> dict[str, Any]:
    """The table itself, if everything in it is known and of its kind."""
    strange = set(values) - set(_KINDS)
    if strange:
        near = "".join(meant(name, _KINDS) for name in sorted(strange)[:1])
        raise ValueError(
            f"unknown {', '.join(sorted(strange))}; known are {', '.join(sorted(_KINDS))}{near}"
        )
    for name, kind in _KINDS.items():
        if not isinstance(values.get(name), kind | None) or isinstance(values.get(name), bool):
            raise ValueError(f"{name} must be {_KIND_NAMES[kind]}, got {values[name]!r}")
    return values


def make_run(values: dict[str, Any]) -> Run:
    """A run from a table as `config.toml` has it, over the job's own settings; checked."""
    check_table(values)
    job, size = find(str(values.get("job"))), str(values.get("size", "tiny"))
    if size not in SIZES:
        raise ValueError(f"--size is one of {', '.join(SIZES)}, got {size!r}{meant(size, SIZES)}")
    given = values.get("settings", {})
    if "epochs" in given and "steps" not in given:
        given = given | {"steps": 0}
    settings = make_settings(given, job.sizes[size])
    data = values.get("data")
    made = {"settings": settings, "data": None if data == job.embedded else data}
    run = Run(**values | made)
    run.reducer()
    if run.net != "none":
        units.rate(run.net)
    if run.job not in OWN and find_spec("transformers") is None:
        raise ValueError(f"{run.job} needs transformers: pip install 'thinwire[jobs]'")
    if settings.length and not job.reads:
        raise ValueError(f"length is for jobs that read text, {run.job} does not")
    if run.workers is not None and not 1 <= run.workers <= MOST_WORKERS:
        raise ValueError(f"workers must be 1 to {MOST_WORKERS}, got {run.workers}")
    if run.checkpoint is not None and run.job in OWN:
        raise ValueError(f"--checkpoint is for networks from transformers, {run.job} is not one")
    return run


def read_toml(path: Path) -> dict[str, Any]:
    """The table of a TOML file."""
    try:
        with path.open("rb") as file:
            return check_table(tomllib.load(file))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no TOML: {error}") from None


def to_toml(*runs: Run) -> str:
    """A run as TOML, everything in it; of several, what they differ in is a list."""
    import tomli_w

    return tomli_w.dumps(_join([asdict(run) | {"data": run.material} for run in runs]))


def _join(tables: Sequence[dict[str, Any]]) -> dict[str, Any]:
    joined: dict[str, Any] = {}
    for name in tables[0]:
        values = [table[name] for table in tables]
        once = [value for n, value in enumerate(values) if value not in values[:n]]
        if isinstance(values[0], dict):
            joined[name] = _join(values)
        elif values[0] is not None:  # runs of one comparison all have it, or none
            joined[name] = once[0] if len(once) == 1 else once
    return joined
