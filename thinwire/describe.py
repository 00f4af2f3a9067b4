"""A recipe as text: the same on every rank that runs the same code, different otherwise.

Functions print as module.qualname and a digest of their code, never as an address. Two ranks
whose descriptions differ would disagree in mid-training, so the engine compares them beforehand.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import types
from typing import Any


def describe(thing: Any) -> str:
    """What this part is, with everything it is made of."""
    if dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        fields = (f"{f.name}={describe(getattr(thing, f.name))}" for f in dataclasses.fields(thing))
        return f"{type(thing).__name__}({', '.join(fields)})"
    if isinstance(thing, functools.partial):
        inside = ", ".join(describe(part) for part in (thing.func, thing.args, thing.keywords))
        return f"partial({inside})"
    if isinstance(thing, types.MethodType):
        return f"{describe(thing.__self__)}.{thing.__func__.__name__}"
    if isinstance(thing, types.FunctionType):
        return f"{thing.__module__}.{thing.__qualname__}#{_digest(thing)}"
    if isinstance(thing, tuple | list):
        return f"({', '.join(describe(item) for item in thing)})"
    if isinstance(thing, dict):
        return f"{{{', '.join(f'{key!r}: {describe(thing[key])}' for key in sorted(thing))}}}"
    if isinstance(thing, str | int | float | bool | None):
        return repr(thing)
    kind = f"{type(thing).__module__}.{type(thing).__qualname__}"
    return kind if not hasattr(thing, "__dict__") else f"{kind}{describe(vars(thing))}"


def _digest(function: types.FunctionType) -> str:
    cells = [_content(cell) for cell in function.__closure__ or ()]
    text = f"{_code(function.__code__)}{describe(function.__defaults__)}{describe(cells)}"
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _code(code: types.CodeType) -> str:
    """Code without line numbers and file names: the same source on another machine is the same."""
    constants = [_code(c) if isinstance(c, types.CodeType) else repr(c) for c in code.co_consts]
    return f"{code.co_code.hex()}{constants}{code.co_names}{code.co_varnames}"
