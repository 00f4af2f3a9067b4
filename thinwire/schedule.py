"""Any number of a recipe may be a schedule: a plain function of the step.

Schedules are frozen dataclasses rather than closures, so that they print what they are and two
ranks with different schedules are told apart.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Number = float | Callable[[int], float]


def at(number: Number, step: int) -> float:
    """The number at this step."""
    return number(step) if callable(number) else number


@dataclass(frozen=True)
class Piecewise:
    """`values[i]` until step `until[i]`, the last value from then on."""

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
    """Geometric from `start` to `end` over `steps` steps, `end` from then on."""

    start: float
    end: float
    steps: int

    def __post_init__(self) -> None:
        if not (self.start > 0 and self.end > 0 and self.steps > 0):
            raise ValueError(f"a ramp needs start, end and steps above 0, got {self}")

    def __call__(self, step: int) -> float:
        done = min(1.0, step / self.steps)
        return float(self.start * (self.end / self.start) ** done)


def checked_density(density: float) -> float:
    """The density itself, or a ValueError that says what would do."""
    if isinstance(density, bool) or not isinstance(density, int | float) or not 0 < density <= 1:
        raise ValueError(
            f"density must be in (0, 1], got {density!r}; 0.01 keeps one entry in a hundred, "
            "1.0 keeps all"
        )
    return float(density)
