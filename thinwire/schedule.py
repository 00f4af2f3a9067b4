"""Any number of a recipe may be a schedule: a plain function of the step.

`Number` and `Whole` are the types of such options; `read_number` reads them for one step.

Schedules are frozen dataclasses rather than closures, so that they print what they are and two
ranks with different schedules are told apart. A density may also depend on the parameter.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeGuard, TypeVar

from thinwire.describe import describe, spell, tag_call
from thinwire.layout import Slot

Schedule = Callable[[int], float]
Number = float | Schedule
Whole = int | Schedule  # of which every value is whole
Plain = TypeVar("Plain")


def at(number: Number, step: int) -> float:
    """The number at this step."""
    return number(step) if callable(number) else number


def read_number(number: Plain | Schedule) -> Plain:
    """The number itself. Recipes are built for one step, so no schedule ever gets this far."""
    assert not callable(number), "a schedule where a number of one step belongs"
    return number


@dataclass(frozen=True)
class Piecewise:
    """`values[i]` until step `until[i]`, the last value from then on.

    Args:
        until: Rising steps, one fewer than values.
        values: What the number is up to each of them, and after the last.

    Example:
        >>> Piecewise(until=(100,), values=(0.25, 0.01))(100)
        0.01
    """

    until: tuple[int, ...]
    values: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.values) != len(self.until) + 1 or list(self.until) != sorted(set(self.until)):
            raise ValueError(
                f"a piecewise schedule needs rising steps and one value more than steps, got "
                f"until={self.until}, values={self.values}; e.g. until=(100,), values=(0.25, 0.01)"
            )

    def __call__(self, step: int) -> float:
        return self.values[sum(step >= edge for edge in self.until)]


@dataclass(frozen=True, kw_only=True)
class Ramp:
    """Geometric from `start` to `end` over `steps` steps, `end` from then on.

    Args:
        start: The number in the first step, above 0.
        end: The number after the ramp, above 0.
        steps: How many steps the ramp lasts.

    Example:
        >>> Ramp(start=0.4, end=0.1, steps=100)(50)
        0.2
    """

    start: float
    end: float
    steps: int

    def __post_init__(self) -> None:
        if not (self.start > 0 and self.end > 0 and self.steps > 0):
            raise ValueError(f"a ramp needs start, end and steps above 0, got {self}")

    def __call__(self, step: int) -> float:
        done = min(1.0, step / self.steps)
        return float(self.start * (self.end / self.start) ** done)


@dataclass(frozen=True)
class Flushed:
    """As `then` says, but 1.0 from the last step on: the whole residual is sent.

    Steps that were skipped, as for a loss scale, are not counted.

    Args:
        then: The density before that: a number or a schedule.
        steps: Optimizer steps in the whole training.

    Example:
        >>> Flushed(0.01, 1000)(999)
        1.0
    """

    then: Number
    steps: int

    def __post_init__(self) -> None:
        checked_whole("steps", self.steps, 1, "as many as the training has")

    def __call__(self, step: int) -> float:
        return 1.0 if step >= self.steps - 1 else at(self.then, step)


def dgc_ramp(density: float, epochs: int, every: int) -> Piecewise:
    """DGC's warm-up by formula: density ** ((e + 1) / (epochs + 1)) in epoch e, then the density.

    Lin et al. 2018 (arXiv 1712.01887), as in its authors' code.

    Args:
        density: Where it ends, in (0, 1].
        epochs: Epochs of the warm-up.
        every: Steps per epoch.

    Example:
        >>> dgc_ramp(0.01, epochs=1, every=100)(0)
        0.1
    """
    checked_whole("epochs", epochs, 1, "the length of the ramp")
    checked_density(density)
    rising = tuple(density ** ((e + 1) / (epochs + 1)) for e in range(epochs))
    return stages((*rising, density), every)


def stages(values: tuple[float, ...], every: int) -> Piecewise:
    """These values in turn, each for `every` steps, the last from then on.

    Args:
        values: The numbers, in their order.
        every: Steps per number.

    Example:
        >>> stages((0.25, 0.05, 0.01), every=100)(150)
        0.05
    """
    checked_whole("every", every, 1, "the steps of a stage")
    return Piecewise(tuple(every * (i + 1) for i in range(len(values) - 1)), values)


Which = str | Callable[[Slot], bool]  # parameters: a pattern found in their names, or a rule


@dataclass(frozen=True)
class ByParameter:
    """A density for every parameter: that of the first pattern or rule that holds for it."""

    rules: tuple[tuple[Which, Number], ...]

    @staticmethod
    def of(densities: Mapping[Which, Number]) -> ByParameter:
        if not densities:
            raise ValueError("densities by parameter need at least one, got {}; e.g. {'': 0.01}")
        rules = tuple(densities.items())
        for number, (which, _) in enumerate(rules):
            if not callable(which):
                _compiles(which)
            if which == "" and number < len(rules) - 1:
                raise ValueError(
                    f"'' is found in every name, so what comes behind it is never reached, got "
                    f"{describe(dict(rules))}; put '' last"
                )
        return tag_call(ByParameter(rules), f"ByParameter.of({spell(dict(rules))})")

    @property
    def patterns(self) -> tuple[str, ...]:
        """Those that are meant for some parameters; '' is for whatever else there is."""
        return tuple(which for which, _ in self.rules if isinstance(which, str) and which)

    def holds(self, number: int, slot: Slot) -> bool:
        which, _ = self.rules[number]
        return which(slot) if callable(which) else re.search(which, slot.name) is not None

    def rule_of(self, slot: Slot) -> int | None:
        """Which rule is this parameter's: the first that holds."""
        return next((n for n in range(len(self.rules)) if self.holds(n, slot)), None)

    def at(self, slot: Slot, step: int) -> float:
        number = self.rule_of(slot)
        if number is not None:
            return at(self.rules[number][1], step)
        known = ", ".join(describe(which) for which, _ in self.rules)
        raise ValueError(
            f"no density for parameter {slot.name!r} (there are {known}); end with '': 0.01"
        )


Density = Number | ByParameter


def density_at(density: Density, step: int, slot: Slot) -> float:
    """The density of a parameter at this step, checked."""
    here = density.at(slot, step) if isinstance(density, ByParameter) else at(density, step)
    return checked_density(here)


def thinned(density: Density, factor: float) -> Density:
    """So many times a density that is known at a step already."""
    if factor == 1.0:
        return density
    if isinstance(density, ByParameter):
        rules = tuple((which, _Times(number, factor)) for which, number in density.rules)
        return ByParameter(rules)
    return _Times(density, factor)(0)


@dataclass(frozen=True)
class _Times:
    number: Number
    factor: float

    def __call__(self, step: int) -> float:
        return min(1.0, at(self.number, step) * self.factor)


def is_number(value: object) -> TypeGuard[float]:
    """Whether it is an int or a float; True is no number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_whole(value: object) -> TypeGuard[int]:
    """Whether it is an int; True is no number."""
    return isinstance(value, int) and not isinstance(value, bool)


def check_densities(density: Density) -> None:
    """Every density that can be known before the training: all of a schedule's, or its first."""
    if isinstance(density, ByParameter):
        for _, number in density.rules:
            check_densities(number)
    elif isinstance(density, Piecewise):
        for value in density.values:
            checked_density(value)
    elif isinstance(density, Ramp):
        checked_density(density.start)
        checked_density(density.end)
    elif not callable(density):
        checked_density(density)


def checked_density(density: float) -> float:
    """The density itself, or a ValueError that says what would do."""
    if not is_number(density) or not 0 < density <= 1:
        raise ValueError(
            f"density must be in (0, 1], got {density!r}; 0.01 keeps one entry in a hundred, "
            "1.0 keeps all"
        )
    return float(density)


def checked_flag(name: str, value: bool) -> bool:
    """The value itself; a string such as "no" would count as true."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")
    return value


def checked_whole(name: str, value: int, least: int, remedy: str) -> int:
    """The value itself, if it is a whole number of at least `least`; True is no number."""
    if not is_whole(value) or value < least:
        raise ValueError(
            f"{name} must be a whole number of at least {least}, got {value!r}; give {remedy}"
        )
    return value


def _compiles(pattern: str) -> None:
    try:
        re.compile(pattern)
    except (re.error, TypeError) as error:
        raise ValueError(
            f"{pattern!r} is not a pattern ({error}); write a regular expression that is found in "
            "the parameter's name, e.g. 'head.*weight'"
        ) from None
