"""Flags that commands share, and what was asked for: a file, flags over it, --set.

What was asked for is a table as config.toml has it.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from thinwire_lab.runs import config

Size = Annotated[str | None, typer.Option(help="Size of the job: tiny, small or paper.")]
Workers = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=config.MOST_WORKERS,
        help="Local worker processes: default 2 to train, 4 to compare.",
    ),
]
Net = Annotated[
    str | None, typer.Option(help="Rate of each link, as 1gbit; none for loopback (default).")
]
DataPath = Annotated[
    str | None, typer.Option(help="Path of the data, or fake; default: embedded data.")
]
Weights = Annotated[
    Path | None, typer.Option(help="Pretrained weights: a local checkpoint folder.")
]
Config = Annotated[
    Path | None, typer.Option("--config", help="TOML file with options; flags override it.")
]
Setting = Annotated[
    list[str] | None, typer.Option("--set", help="Any setting, as momentum=0.8; repeatable.")
]
Epochs = Annotated[float | None, typer.Option(help="Passes over the training data.")]
Steps = Annotated[int | None, typer.Option(min=1, help="Training steps, instead of epochs.")]
Batch = Annotated[int | None, typer.Option(help="Examples per worker and batch.")]
Rate = Annotated[float | None, typer.Option(help="Peak learning rate.")]
Seed = Annotated[int | None, typer.Option(help="Seed for weight initialisation and data order.")]
FLAGGED = ("epochs", "steps", "batch", "rate", "seed")  # settings that have a flag of their own


def whole(least: int) -> Callable[[Any], int]:
    """Reads a whole number as people write it: 25000000, 25_000_000, 2.5e7."""

    def number(text: Any) -> int:
        try:
            read = float(text)
        except ValueError:
            read = math.nan
        if not read.is_integer():
            raise typer.BadParameter(f"{text!r} is not a whole number, as 1000000 or 1e6.")
        if read < least:
            raise typer.BadParameter(f"{text} is not in the range x>={least}.")
        return int(read)

    return number


def merge(base: dict[str, Any], setting: list[str] | None, **flags: Any) -> dict[str, Any]:
    """File, then flags, then --set. A flag that is named as a setting is one."""
    asked = {k: str(v) if isinstance(v, Path) else v for k, v in flags.items() if v is not None}
    settings = {name: asked.pop(name) for name in FLAGGED if name in asked}
    for text in setting or []:
        name, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"--set takes name=value, got {text!r}")
        settings[name.strip()] = _parse_value(value)
    if {"epochs", "steps"} <= settings.keys():
        raise ValueError("a length is given in epochs or in steps, not both")
    return override(base, asked | {"settings": settings})


def override(base: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """One table over another, and their settings likewise: epochs over a length in steps too."""
    given = more.get("settings", {})
    counted = {"steps": 0} if "epochs" in given and "steps" not in given else {}
    settings = base.get("settings", {}) | counted | given
    return base | more | {"settings": settings}


def _parse_value(text: str) -> Any:
    """A value as TOML writes it; what it cannot read is a string."""
    try:
        return tomllib.loads(f"x = {text}")["x"]
    except tomllib.TOMLDecodeError:
        return text


def parse_seeds(text: str | None, default: int) -> list[int]:
    if text is None:
        return [default]
    try:
        return list(dict.fromkeys(int(seed) for seed in text.split(",")))
    except ValueError:
        raise ValueError(f"--seeds are numbers with commas, as 0,1,2; got {text!r}") from None
