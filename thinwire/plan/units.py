"""Rates and times as people write them: 1gbit, 50us."""

from __future__ import annotations

import re
from collections.abc import Mapping

_RATES = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_ALSO = {"bps": 1.0, "kbps": 1e3, "mbps": 1e6, "gbps": 1e9}  # bits, as networks are sold
_ALSO |= {f"{unit}/s": bits for unit, bits in _RATES.items()}
_TIMES = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}


def rate(text: str) -> float:
    """Bits per second."""
    return _read(text, _RATES, "a rate", "1gbit or 100mbit", _ALSO)


def seconds(text: str) -> float:
    return _read(text, _TIMES, "a time", "50us or 1ms")


def _read(
    text: str, units: dict[str, float], what: str, example: str, also: Mapping[str, float] = {}
) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([a-z/]+)", text.strip().lower())
    known = {**units, **also}
    if found is None or found[2] not in known or float(found[1]) <= 0:
        raise ValueError(f"{what} is a number and a unit ({', '.join(units)}), got {text!r}; "
                         f"e.g. {example}")  # fmt: skip
    return float(found[1]) * known[found[2]]
