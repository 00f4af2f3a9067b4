"""What was asked for on the command line, as config.toml has it: a file, flags over it, --set."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer


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


def collect_flags(
    job: str, recipe: str | None, size: str | None, data: str | None, net: str | None,
    workers: int | None, checkpoint: Path | None,
) -> dict[str, Any]:  # fmt: skip
    """As config.toml has them."""
    return {
        "job": job, "recipe": recipe, "size": size, "data": data, "net": net, "workers": workers,
        "checkpoint": None if checkpoint is None else str(checkpoint),
    }  # fmt: skip


def merge(
    base: dict[str, Any], flags: dict[str, Any], given: dict[str, Any], setting: list[str] | None
) -> dict[str, Any]:
    """File, then flags, then --set."""
    settings = {k: v for k, v in given.items() if v is not None}
    for text in setting or []:
        name, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"--set takes name=value, got {text!r}")
        settings[name.strip()] = _parse_value(value)
    if {"epochs", "steps"} <= settings.keys():
        raise ValueError("a length is given in epochs or in steps, not both")
    asked = {k: v for k, v in flags.items() if v is not None}
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
