"""Rates and times as people write them: 1gbit, 50us."""

from __future__ import annotations

import re

_RATES = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_TIMES = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}


def rate(text: str) -> float:
    """Bits a second."""
    return _read(text, _RATES, "a rate", "1gbit or 100mbit")


def seconds(text: str) -> float:
    return _read(text, _TIMES, "a time", "50us or 1ms")


def _read(text: str, units: dict[str, float], what: str, example: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([a-z]+)", text.strip().lower())
    if found is None or found[2] not in units or float(found[1]) <= 0:
        raise ValueError(f"{what} is a number and a unit ({', '.join(units)}), got {text!r}; "
                         f"e.g. {example}")  # fmt: skip
    return float(found[1]) * units[found[2]]
