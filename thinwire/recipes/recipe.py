"""What makes a function a recipe: shared options, schedules for its numbers, a call to print.

`list_options` lists what a recipe takes and `read_docs` what its docstring says, for whoever asks:
`parse`, `thinwire list`, `auto`.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypedDict, TypeVar, get_args, get_type_hints

from thinwire.choose import Choose
from thinwire.combinators import Scheduled
from thinwire.describe import parts, spell, tag_call
from thinwire.protocols import Reducer
from thinwire.recipes.options import USUAL, Shared, Sparse, Wired
from thinwire.schedule import Schedule, checked_flag
from thinwire.spelling import meant

Recipe = TypeVar("Recipe", bound=Callable[..., Reducer])
# The parts these go to ask for the number of the step by themselves.
ASKED = {"density", "rank", "decay"}
# Types as people read them; others are shown as they are written.
TYPES = {
    "Densities": "number, schedule or {pattern: number}", "Number": "number or schedule",
    "Number | None": "number, schedule or None", "Whole": "whole number or schedule",
    "Whole | None": "whole number, schedule or None", "Merge": "name, collective or None",
    "Parameters": "rule or patterns", "Parameters | None": "rule, patterns or None",
    "str | Memory": "name or memory", "str | Wire": "name or wire", "str | View": "name or view",
    "int": "whole number", "bool": "True or False", "int | None": "whole number or None",
    "bool | int": "True, False or whole number", "bool | tuple[int, int]": "True, False or period",
    "int | Sequence[float]": "whole number or list", "Sequence[str]": "list of names",
    "Sequence[str] | None": "list of names or None",
    "str": "name", "float": "number",
}  # fmt: skip


class Alone(TypedDict):
    """The options that a recipe shares which shares none."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """One option of a recipe; `shared` if others have it too."""

    name: str
    default: Any
    type: str
    meaning: str
    shared: bool


@dataclass(frozen=True, kw_only=True)
class Documented:
    """A recipe's docstring: its first sentence, what follows, an example and the source."""

    summary: str
    text: str
    example: str
    source: str


def recipe(**usual: Any) -> Callable[[Recipe], Recipe]:
    """Make a function a recipe; `usual` are shared options whose default is another here.

    Options of type `Number` or `Whole` may be schedules, those of type `bool` are checked, and
    whatever shared option is not given has its default.
    """

    def made(function: Recipe) -> Recipe:
        known = _make_signature(function, usual)
        hints = get_type_hints(function) | get_type_hints(_shared_type(function))
        numbers = {name for name, hint in hints.items() if Schedule in get_args(hint)} - ASKED
        flags = {name for name, hint in hints.items() if hint is bool}

        @functools.wraps(function)
        def built(*args: Any, **keywords: Any) -> Reducer:
            try:
                given = known.bind(*args, **keywords)
            except TypeError as error:
                raise TypeError(f"{error}; {suggest_options(built, keywords)}") from None
            typed = _type_call(function.__name__, known, given.arguments)
            for name in flags & set(given.arguments):
                checked_flag(name, given.arguments[name])
            moving = {n: x for n, x in given.arguments.items() if n in numbers and callable(x)}
            if moving:
                rest = {n: x for n, x in given.arguments.items() if n not in moving}
                return tag_call(_follow(built, moving, rest), typed)
            given.apply_defaults()
            return tag_call(function(**given.arguments), typed)

        built.__signature__ = known  # type: ignore[attr-defined]
        return built  # type: ignore[return-value]

    return made


def suggest_options(function: Callable[..., Any], keywords: dict[str, Any]) -> str:
    """The end of a message about a call that does not fit: what is taken, what was meant."""
    known = list(inspect.signature(function).parameters)
    strange = next((name for name in keywords if name not in known), None)
    near = "" if strange is None else meant(strange, known)
    return f"{function.__name__} takes {', '.join(known) or 'no options'}{near}"


def list_options(function: Callable[..., Reducer]) -> list[Option]:
    """Every option of a recipe: its own, and after them those that recipes share."""
    shared = _shared_type(function)
    docs = [inspect.getdoc(home) or "" for home in (Shared, Wired, Sparse, function)]
    meanings = {name: text for doc in docs for name, text in _arguments(doc)}
    return [
        Option(
            name=option.name,
            default=option.default,
            type=TYPES.get(option.annotation, option.annotation),
            meaning=meanings[option.name],
            shared=option.name in shared.__annotations__,
        )
        for option in inspect.signature(function).parameters.values()
    ]


def read_docs(function: Callable[..., Reducer]) -> Documented:
    """What the docstring of a recipe says, without the meaning of its options."""
    text = inspect.getdoc(function) or ""
    summary, _, rest = text.partition("\n")
    parted = re.split(r"^(Args|Example|Source):", rest, flags=re.M)
    sections = dict(zip(parted[1::2], map(_join, parted[2::2]), strict=True))
    return Documented(
        summary=summary,
        text=_join(parted[0]),
        example=sections.get("Example", ""),
        source=sections.get("Source", "").removesuffix("."),
    )


def _follow(built: Callable[..., Reducer], moving: dict[str, Any], rest: dict[str, Any]) -> Reducer:
    """A recipe that is built anew for every value its numbers take."""
    scheduled = Scheduled(built, tuple(moving.items()), tuple(rest.items()))
    if any(isinstance(part, Choose) for part in parts(scheduled)):
        raise ValueError(
            f"partial times the steps of one recipe, got a schedule for {', '.join(moving)}, which "
            "makes another in every step; give a number, or leave out partial"
        )
    return scheduled


def _type_call(name: str, known: inspect.Signature, given: dict[str, Any]) -> str:
    """The call: the first option always, others where they are not default."""
    shown = [
        f"{option.name}={spell(given.get(option.name, option.default))}"
        for option in known.parameters.values()
        if option.kind is option.POSITIONAL_OR_KEYWORD
        or given.get(option.name, option.default) != option.default
    ]
    return f"{name}({', '.join(shown)})"


def _make_signature(function: Callable[..., Reducer], usual: dict[str, Any]) -> inspect.Signature:
    """The function's own options, and those it shares with others by name."""
    own = inspect.signature(function)
    named = [p for p in own.parameters.values() if p.kind is not p.VAR_KEYWORD]
    kind, defaults = inspect.Parameter.KEYWORD_ONLY, USUAL | usual
    more = [
        inspect.Parameter(n, kind, default=defaults[n], annotation=a.__forward_arg__)
        for n, a in _shared_type(function).__annotations__.items()
    ]
    return own.replace(parameters=[*named, *more])


def _shared_type(function: Callable[..., Reducer]) -> Any:
    """The TypedDict of `**shared: Unpack[...]`; an empty one, if the recipe shares no options."""
    plain = inspect.unwrap(function)
    unpacked = get_args(get_type_hints(plain).get("shared"))
    return unpacked[0] if unpacked else Alone


def _arguments(doc: str) -> Iterator[tuple[str, str]]:
    """Name and meaning of every line of a docstring's "Args:"."""
    section = re.search(r"^Args:\n((?:    .*\n?|\n)*)", doc, flags=re.M)
    found = re.split(r"^    (\**\w+): ", section[1], flags=re.M)[1:] if section else []
    for name, text in zip(found[::2], found[1::2], strict=True):
        yield name, _join(text)


def _join(text: str) -> str:
    return " ".join(text.split())
