"""A recipe as text: the same on every rank that runs the same code, different otherwise.

Functions print as module.qualname and a digest of their code, never as an address. Two ranks
whose descriptions differ would disagree in mid-training, so the engine compares them beforehand.
"""

from __future__ import annotations

import dataclasses
import hashlib
import types
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

DEEPEST = 12


def describe(thing: Any, depth: int = 0) -> str:
    """What this part is, with everything it is made of; of foreign objects only the type."""
    inside = partial(describe, depth=depth + 1)
    if depth > DEEPEST:  # a function that refers to itself
        return "..."
    if dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        fields = (
            f"{f.name}={inside(getattr(thing, f.name))}"
            for f in dataclasses.fields(thing)
            if f.repr
        )
        return f"{type(thing).__name__}({', '.join(fields)})"
    if isinstance(thing, partial):
        return f"partial({inside(thing.func)}, {inside(thing.args)}, {inside(thing.keywords)})"
    if isinstance(thing, types.MethodType):
        return f"{inside(thing.__self__)}.{thing.__func__.__name__}"
    if isinstance(thing, types.FunctionType):
        return f"{thing.__module__}.{thing.__qualname__}#{_digest(thing, depth)}"
    if isinstance(thing, tuple | list):
        return f"({', '.join(map(inside, thing))})"
    if isinstance(thing, dict):
        return f"{{{', '.join(f'{key!r}: {inside(value)}' for key, value in thing.items())}}}"
    if isinstance(thing, set | frozenset):  # their order differs from process to process
        return f"{{{', '.join(sorted(map(inside, thing)))}}}"
    if isinstance(thing, str | int | float | bool | None):
        return repr(thing)
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def parts(thing: Any) -> Iterator[Any]:
    """The thing itself and every part of a part of it.

    A part that makes its parts anew in every step has a `parts` of its own.
    """
    yield thing
    if isinstance(thing, type):
        return
    if callable(getattr(thing, "parts", None)):
        yield from thing.parts()
    elif isinstance(thing, tuple):
        for part in thing:
            yield from parts(part)
    elif dataclasses.is_dataclass(thing):
        for field in dataclasses.fields(thing):
            yield from parts(getattr(thing, field.name))


def rebuilt(thing: Any, change: Callable[[Any], Any]) -> Any:
    """The same, with what `change` makes of every part it wants to change: the outermost first.

    A part that makes its parts anew in every step has a `rebuilt` of its own.
    """
    if hasattr(thing, "rebuilt") and not isinstance(thing, type):
        return thing.rebuilt(change)
    new = change(thing)
    return rebuilt_inside(thing, change) if new is thing else new


def rebuilt_inside(thing: Any, change: Callable[[Any], Any]) -> Any:
    """The same for its parts only."""
    if type(thing) is tuple:
        items = tuple(rebuilt(part, change) for part in thing)
        return items if any(a is not b for a, b in zip(items, thing, strict=True)) else thing
    if not dataclasses.is_dataclass(thing) or isinstance(thing, type):
        return thing
    inside = {f.name: getattr(thing, f.name) for f in dataclasses.fields(thing)}
    changed = {name: rebuilt(part, change) for name, part in inside.items()}
    changed = {name: part for name, part in changed.items() if part is not inside[name]}
    return dataclasses.replace(thing, **changed) if changed else thing


def sketch(thing: Any) -> str:
    """The same for people: parts by name, with what is not their default."""
    if dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        shown = [
            sketch(getattr(thing, f.name))
            if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
            else f"{f.name}={sketch(getattr(thing, f.name))}"
            for f in dataclasses.fields(thing)
            if getattr(thing, f.name) != _default(f)
        ]
        return type(thing).__name__ + (f"({', '.join(shown)})" if shown else "")
    if isinstance(thing, types.FunctionType):
        return thing.__name__
    if isinstance(thing, float):
        return f"{thing:.4g}"
    if isinstance(thing, tuple):
        return f"({', '.join(map(sketch, thing))})"
    return repr(thing)


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _digest(function: types.FunctionType, depth: int) -> str:
    cells = [_content(cell) for cell in function.__closure__ or ()]
    around = describe((function.__defaults__, function.__kwdefaults__, cells), depth + 1)
    return hashlib.sha256(f"{_code(function.__code__)}{around}".encode()).hexdigest()[:8]


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _code(code: types.CodeType) -> str:
    """Code without line numbers and file names: the same source on another machine is the same."""
    constants = [_code(c) if isinstance(c, types.CodeType) else describe(c) for c in code.co_consts]
    return f"{code.co_code.hex()}{constants}{code.co_names}{code.co_varnames}"
