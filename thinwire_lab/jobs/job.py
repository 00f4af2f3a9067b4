"""What a job is: a model, its data, what is minimised and reported; and how it is trained."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from thinwire.spelling import meant
from thinwire_lab.jobs.data.source import Batch, Data, MissingData

SIZES = ("tiny", "small", "paper")
FAKE = "fake"
MOST = 10**9  # of any number but the seed: what is beyond overflows somewhere
MOST_SEED = 2**32  # each rank's dropout has a thousand of its own
LOWER = ("loss", "test_loss", "perplexity", "wer", "cer")  # figures of which less is better
ROUNDED = 1e-9  # of a step: thirds of one do not add up exactly
SHORTEST = 16  # words, of which a question may have a quarter

LEAST = {"batch": 1, "accumulate": 1} | dict.fromkeys((
    "steps", "warmup_steps", "schedule_steps", "length", "seed", "loaders", "momentum",
    "weight_decay", "warmup", "clip", "score_every", "save_every", "patience"), 0)  # fmt: skip
CHOICES = {
    "optimizer": ("sgd", "adam", "adamw", "sign"),
    "schedule": ("constant", "cosine", "linear", "milestones", "plateau"),
    "precision": ("fp32", "bf16", "fp16"),
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How to train. `batch` is a worker's; the length is `steps`, or if 0 so many `epochs`."""

    batch: int
    rate: float
    epochs: float = 1.0
    steps: int = 0
    seed: int = 0
    optimizer: str = "sgd"  # one of CHOICES, as others below; sign has no momentum
    momentum: float = 0.9
    epsilon: float = 1e-8  # of adam and adamw
    weight_decay: float = 0.0
    rate_by_workers: bool = False  # the learning rate is `rate` times their number
    warmup: float = 0.0  # epochs in which the learning rate rises from nothing
    warmup_steps: int = 0  # the same in steps
    schedule: str = "cosine"
    schedule_steps: int = 0  # what it is planned for, if not for as many steps as are taken
    milestones: tuple[float, ...] = ()  # epochs at which the rate is multiplied by `gamma`
    gamma: float = 0.1  # of milestones, and of a plateau
    patience: int = 3  # scores in a row that are no better, and one more ends a plateau
    clip: float = 0.0  # largest norm of a gradient; 0 is none
    accumulate: int = 1  # batches a step
    length: int = 0  # words that a job of text reads at once; 0 is as many as its size has
    precision: str = "fp32"  # or bf16, fp16: autocast
    loaders: int = 0  # processes that read ahead
    bucket_mb: float = 25.0
    score_every: float = 1.0  # epochs; 0 is at the end only
    save_every: float = 1.0  # epochs; 0 is at the end only

    def __post_init__(self) -> None:
        for f in fields(self):  # whole numbers do for others
            value = getattr(self, f.name)
            if f.type == "float" and isinstance(value, int) and not isinstance(value, bool):
                object.__setattr__(self, f.name, float(value))
            if f.type == "float" and not abs(value) < math.inf:
                raise ValueError(f"{f.name} must be a finite number, got {value!r}")
            if f.type in ("int", "float") and f.name != "seed" and value > MOST:
                raise ValueError(f"{f.name} must be at most {MOST}, got {value!r}")
        for name, least in LEAST.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not value >= least:
                raise ValueError(f"{name} must be at least {least}, got {value!r}")
        for name, allowed in CHOICES.items():
            value = getattr(self, name)
            if value not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")
        if self.seed > MOST_SEED:
            raise ValueError(f"seed must be at most {MOST_SEED}, got {self.seed}")
        for name in ("rate", "epsilon", "bucket_mb", "gamma"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)!r}")
        if 0 < self.length < SHORTEST:
            raise ValueError(f"length must be at least {SHORTEST}, got {self.length}")
        if self.schedule == "plateau" and not self.score_every:
            raise ValueError("a plateau is one of scores: give score_every above 0")
        if not self.momentum < 1:
            raise ValueError(f"momentum must be below 1, got {self.momentum!r}")
        if not self.steps and not self.epochs > 0:
            raise ValueError(f"give steps, or epochs above 0; got epochs={self.epochs!r}")

    def of_epochs(self, epochs: float, each: float) -> int:
        """So many epochs in steps, at least one if any; `each` is steps an epoch."""
        return max(1, math.ceil(epochs * each - ROUNDED)) if epochs else 0

    def total(self, each: float) -> int:
        return self.steps or self.of_epochs(self.epochs, each)


DEFAULTS = {f.name: f.default for f in fields(Settings) if f.default is not MISSING}


def make_settings(values: Mapping[str, Any], base: Settings) -> Settings:
    """The base with these values instead; unknown names and wrong types are errors."""
    known = {f.name: getattr(base, f.name) for f in fields(Settings)}
    for name, value in values.items():
        if name not in known:
            near = meant(name, known)
            raise ValueError(f"unknown setting {name!r}; known are {', '.join(known)}{near}")
        like = known[name]
        if isinstance(like, tuple):
            value = _numbers(name, value)
        elif type(value) is not type(like) and (type(value), type(like)) != (int, float):
            raise ValueError(f"{name} is a {type(like).__name__}, got {value!r}")
        known[name] = value
    return Settings(**known)


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where data comes from: a path, FAKE, or None for what comes with Python; and weights."""

    data: Path | str | None = None
    checkpoint: Path | None = None
    length: int = 0

    def words(self, own: int) -> int:
        """How many are read at once: as many as a size has of its own, or fewer."""
        if self.length > own:
            raise ValueError(f"length must be at most {own} at this size, got {self.length}")
        return self.length or own

    @property
    def fake(self) -> bool:
        return self.data == FAKE

    def folder(self, size: str, expected: str) -> Path | None:
        """The path given, which must be there; None where embedded data will do."""
        if self.data is None:
            if size == "paper":
                raise MissingData(f"--size paper needs --data: {expected}, or fake for throughput")
            return None
        path = Path(self.data)
        try:
            path.stat()
            if path.is_dir():
                next(path.iterdir(), None)
        except FileNotFoundError:
            raise MissingData(f"there is no {path}; --data expects {expected}, or fake") from None
        except OSError as error:  # not ours to read, or no name at all
            raise MissingData(f"cannot read {path}: {error.strerror}") from None
        return path


@dataclass(frozen=True, kw_only=True)
class Task:
    """One job at one size. `rows` of all ranks' test batches together make the `figures`.

    `valid` is what a rate that hangs on scores listens to, where there is more than a test.
    """

    net: Callable[[], nn.Module]
    train: Data
    test: Data
    loss: Callable[[nn.Module, Batch], Tensor]
    rows: Callable[[nn.Module, Iterable[Batch]], Tensor]  # (r, columns) float64
    figures: Callable[[Tensor], dict[str, float]]  # the first is the headline
    valid: Data | None = None


@dataclass(frozen=True, kw_only=True)
class Job:
    """A row of the table of jobs."""

    about: str
    embedded: str  # what it trains on without --data
    make: Callable[[str, Source], Task]
    sizes: Mapping[str, Settings]
    reads: bool = False  # text, of some length


def quick(batch: int, rate: float, steps: int, **more: Any) -> Settings:
    """A few steps, nothing saved or scored on the way."""
    return Settings(batch=batch, rate=rate, steps=steps, score_every=0, save_every=0, **more)


def _numbers(name: str, values: Any) -> tuple[float, ...]:
    listed = isinstance(values, list | tuple)
    if not listed or not all(isinstance(v, int | float) and abs(v) < math.inf for v in values):
        raise ValueError(f"{name} is a list of numbers, as [30, 60]; got {values!r}")
    return tuple(float(v) for v in values)
