"""`tuned`: the setting that recorded trainings support, for a saving, a length and an optimizer.

Two, four and eight times fewer bytes are codes of 16, 8 and 4 bits. Beyond that a sparse recipe
starts dense and ramps down, with as much of it as the budget of the whole training pays for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from thinwire.bucket import Bucket
from thinwire.comm.metered import all_reduced
from thinwire.describe import parts, rebuilt, spell
from thinwire.layout import Layout
from thinwire.memory import MomentumCorrected
from thinwire.partial import interpolate
from thinwire.protocols import Comm, Reduced, Reducer, Traffic
from thinwire.recipes.merging import gtopk, slots
from thinwire.recipes.recipe import recipe
from thinwire.recipes.values import bf16, int4, int8
from thinwire.schedule import Flushed, Number, Ramp, checked_flag, is_number, is_whole

CODES = ((2.05, bf16), (4.1, int8), (8.1, int4))  # the most each of them saves, and a little
WIRE = "int8+auto"
LEAST = 0.01  # the density that ramps end at, as recorded
NOMINAL = 1 << 20  # entries of a model whose size is not known
CLUSTERED = 0.96  # indices of real gradients take this share of what random ones would
SAMPLES = 200  # steps at which a schedule is priced


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """A sparse recipe that is complete once the optimizer and the number of workers are known.

    `attach` and `distribute` call `choose`. On its own, in a test or a price list, it is what an
    optimizer without momentum would get.
    """

    saving: float
    steps: int
    clipped: bool = False
    changes: tuple[Callable[[Any], Any], ...] = ()

    def choose(
        self,
        world: int,
        numel: int = NOMINAL,
        *,
        adam: bool = False,
        momentum: float = 0.0,
        nesterov: bool = False,
    ) -> Reducer:
        """The recipe for so many workers and entries, and for an optimizer: of Adam's family, or
        SGD whose `momentum` moves here."""
        if momentum:
            kept = MomentumCorrected(momentum=momentum, nesterov=nesterov, learning_rate=True)
            density: Number = self._ramp("gtopk", 0.75, True, world, numel)
            chosen = gtopk(density=density, memory=kept, wire=WIRE)
        else:
            chosen = slots(density=self._ramp("slots", 0.9 if adam else 0.75, False, world, numel),
                           wire=WIRE)  # fmt: skip
        for change in self.changes:
            chosen = rebuilt(chosen, change)
        return chosen

    __repr__ = spell

    def reduce(self, bucket: Bucket, comm: Comm) -> Reduced:
        return self.choose(comm.size).reduce(bucket, comm)

    def traffic(self, layout: Layout, world: int, step: int = 0) -> Traffic:
        return self.choose(world).traffic(layout, world, step)

    def parts(self) -> Iterator[Any]:
        return parts(self.choose(2))

    def rebuilt(self, change: Callable[[Any], Any]) -> Tuned:
        """Changed once it is complete."""
        return replace(self, changes=(*self.changes, change))

    def _ramp(self, name: str, share: float, flush: bool, world: int, numel: int) -> Number:
        """The ramp over this share of the steps whose bytes meet the budget."""
        lasting = max(1, round(share * self.steps))
        flush = flush and self.steps >= 4 * self.saving  # else it would take most of the budget
        flushed = self.steps if flush else 0
        start, end = _ends(name, self.saving, share, flushed, max(2, world), numel)
        ramp = Ramp(start=start, end=end, steps=lasting)
        return Flushed(ramp, self.steps) if flush else ramp


@recipe()
def tuned(saving: float = 4.0, steps: int | None = None, *, clipped: bool = False) -> Reducer:
    """The best setting on record for a saving of bytes.

    The choice depends on the optimizer that `attach` is given. SGD's momentum moves into the
    recipe: the optimizer's becomes zero and its weight decay is scaled to match, until `pause()`
    or `detach()` puts both back. `sync.explain()` says what was chosen, and what it cost in
    recorded trainings.

    Args:
        saving: Bytes of plain averaging over bytes sent, both over the whole training. 2, 4 and 8
            are codes of 16, 8 and 4 bits; what lies between takes the next one. Above 8 the recipe
            is sparse.
        steps: Optimizer steps in the whole training; needed for a saving above 8.
        clipped: Whether the loop clips gradients by their norm. Momentum then stays in the
            optimizer, because a clipped sum of momenta is no clipped gradient.

    Example:
        tuned(saving=16, steps=10_000)

    Source: our own, from the trainings in docs/results.md.
    """
    _check(saving, steps)
    checked_flag("clipped", clipped)
    for most, code in CODES:
        if saving <= most:
            return code()
    assert steps is not None
    return Tuned(saving=float(saving), steps=steps, clipped=clipped)


def _check(saving: float, steps: int | None) -> None:
    if not is_number(saving) or not 1 <= saving <= 1000:
        raise ValueError(
            f"saving says how many times fewer bytes, from 1 to 1000, got {saving!r}; 4 is eight "
            "bits per value, and 16 a sparse recipe"
        )
    needed = steps is not None or saving > CODES[-1][0]
    if needed and not (is_whole(steps) and steps >= 1):
        raise ValueError(
            f"steps must be how many optimizer steps the training has, got {steps!r}; e.g. "
            f"tuned(saving={saving:g}, steps=10_000)"
        )


@lru_cache
def _ends(
    name: str, saving: float, share: float, flushed: int, world: int, numel: int
) -> tuple[float, float]:
    """Where a ramp starts and ends: from as dense as the budget allows, down to `LEAST`.

    If the budget allows more than that, the ramp ends higher; if it does not allow `LEAST`, the
    density is the same in all steps. `flushed` counts the steps of a training whose last is whole.
    """
    prices = _prices(name, world, numel)
    whole = interpolate(prices, 1.0) / flushed if flushed else 0.0

    def spent(start: float, end: float) -> float:
        return _mean(start, end, share, prices) + whole

    if spent(1.0, LEAST) < 1.0 / saving:
        return 1.0, _solve(lambda end: spent(1.0, end), 1.0 / saving, LEAST, 1.0)
    if spent(LEAST, LEAST) > 1.0 / saving:
        even = _solve(lambda end: spent(end, end), 1.0 / saving, 1e-5, LEAST)
        return even, even
    return _solve(lambda start: spent(start, LEAST), 1.0 / saving, LEAST, 1.0), LEAST


def _solve(spent: Callable[[float], float], budget: float, low: float, high: float) -> float:
    """The density at which what is spent, which grows with it, meets the budget."""
    for _ in range(40):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if spent(middle) < budget else (low, middle)
    return float(f"{low:.3g}")


def _mean(start: float, end: float, share: float, prices: list[tuple[float, float]]) -> float:
    """The mean share of dense bytes over a ramp and what follows it."""
    ramp = (start * (end / start) ** (i / SAMPLES) for i in range(SAMPLES))
    total = sum(interpolate(prices, density) for density in ramp)
    return share * total / SAMPLES + (1 - share) * interpolate(prices, end)


@lru_cache
def _prices(name: str, world: int, numel: int) -> list[tuple[float, float]]:
    """What a step sends, as a share of what dense sends, at densities from 1e-5 to nearly 1."""
    layout = Layout.of({"all": torch.empty(numel, device="meta")})
    dense = all_reduced(4 * numel, world)
    densities = [10 ** (-5 + i / 12) for i in range(60)] + [0.999, 1.0]  # whole: no indices
    recipe = {"gtopk": gtopk, "slots": slots}[name]
    priced = []
    for density in densities:
        sent = recipe(density=density, wire=WIRE).traffic(layout, world, step=1).bytes
        price = sent / dense  # of the second step: the first may look around
        priced.append((density, min(1.0, price * CLUSTERED)))
    return priced
