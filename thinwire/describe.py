"""A recipe as text, for ranks (`describe`) and for people (`spell`); its parts.

`describe` is the same on every rank that runs the same code, and different otherwise. Functions
print as module.qualname and a digest of their code, never as an address. Two ranks whose
descriptions differ would disagree in mid-training, so the engine compares them beforehand.
`spell` is what one would type, and what `repr` of every reducer shows.
"""

from __future__ import annotations

import dataclasses
import hashlib
import types
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

DEEPEST = 12
Thing = TypeVar("Thing")


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


def tag_call(thing: Thing, call: str) -> Thing:
    """The same thing, which from now on says that this call makes it; a changed copy does not."""
    object.__setattr__(thing, "call", call)
    return thing


def spell(thing: Any) -> str:
    """As one would type it: the recipe's call, or constructors with what is not their default."""
    if isinstance(thing, type | types.FunctionType | types.BuiltinFunctionType):
        return str(thing.__name__)
    if dataclasses.is_dataclass(thing):
        return str(getattr(thing, "call", None) or _spell_fields(thing))
    if isinstance(thing, str):
        plain = repr(thing)
        return f'"{plain[1:-1]}"' if plain[0] == "'" and '"' not in plain else plain
    if isinstance(thing, list):
        return f"[{', '.join(map(spell, thing))}]"
    if isinstance(thing, tuple):
        return f"({', '.join(map(spell, thing))}{',' * (len(thing) == 1)})"
    if isinstance(thing, dict):
        return f"{{{', '.join(f'{spell(k)}: {spell(v)}' for k, v in thing.items())}}}"
    if isinstance(thing, set | frozenset):
        return f"{{{', '.join(sorted(map(spell, thing)))}}}"
    if isinstance(thing, partial):
        named = [f"{name}={spell(value)}" for name, value in thing.keywords.items()]
        return f"partial({', '.join([spell(thing.func), *map(spell, thing.args), *named])})"
    if isinstance(thing, types.MethodType):
        return f"{spell(thing.__self__)}.{thing.__func__.__name__}"
    own: Any = type(thing).__repr__
    if own is object.__repr__:  # which would show an address
        return f"{type(thing).__name__}(...)"
    return repr(thing)


def _spell_fields(thing: Any) -> str:
    shown = []
    for field in dataclasses.fields(thing):
        value = getattr(thing, field.name)
        needed = _default(field) is dataclasses.MISSING
        if needed and not field.kw_only:
            shown.append(spell(value))
        elif field.repr and (needed or value != _default(field)):
            shown.append(f"{field.name}={spell(value)}")
    return f"{type(thing).__name__}({', '.join(shown)})"


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
