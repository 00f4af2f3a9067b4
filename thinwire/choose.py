"""Choose: each parameter goes to one of a few reducers, and the clock decides which.

    1. each choice serves the whole model for a few steps and is timed, the first one in between
    2. if asked for, those near the fastest are tried again: a machine's speed wanders
    3. ranks average their times, so that all of them decide alike (`decide`)
    4. from then on every parameter has its choice, which is saved with the state

It sits inside `Remember`, so one choice sends the residual of another. Letting residuals build up
through all trials would cause one large, harmful update. So every other trial step takes the first
choice, which should be dense. A choice survives any layout and checkpoint, until somebody asks for
a new one (`forget`).
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch

from thinwire.bucket import Bucket
from thinwire.comm.metered import Metered, meter_of
from thinwire.describe import rebuilt, spell
from thinwire.layout import Layout, Slot
from thinwire.protocols import Comm, Reduced, Reducer, Traffic
from thinwire.reducers import Select
from thinwire.remember import refuse_memory
from thinwire.route import join

PART = "plan"
HOME = 0  # the choice that sends what others have left over
SETTLING = 2  # steps of a turn that do not count: buckets are made anew, guesses are wrong


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One bucket in one step, in seconds: since the bucket before it was ready, until the first
    verb, inside the verbs, and after them."""

    layout: Layout
    gap: float
    select: float
    exchange: float
    scatter: float


@dataclass
class Trials:
    """What this process has seen: when steps began, and their buckets' turns."""

    begun: dict[int, float] = field(default_factory=dict)
    turns: dict[int, list[Turn]] = field(default_factory=dict)
    ready: float = 0.0  # when the last bucket was

    def step(self, number: int) -> float:
        """Seconds from the begin of a step to that of the next; not a number if unknown."""
        return self.begun.get(number + 1, math.nan) - self.begun.get(number, math.nan)


Assigned = Callable[[Slot], tuple[int, float]]  # which choice, and times its usual density
Decide = Callable[[Trials, Sequence[Sequence[int]], Comm], Assigned]  # steps of every choice


@dataclass(frozen=True, kw_only=True)
class Choose:
    """The choices by name, how they are told apart, and for how many steps each is tried.

    With `finals` those whose steps were within that share of the shortest are tried once more.
    """

    choices: tuple[tuple[str, Reducer], ...]
    decide: Decide
    tries: int = 6
    finals: float = 0.0

    def __post_init__(self) -> None:
        if len(self.choices) < 2:
            raise ValueError(f"a choice needs at least two recipes, got {len(self.choices)}")
        why = "a choice would keep what the next choice has to send"
        refuse_memory(self.choices, "Choose", why)
        if not isinstance(self.tries, int) or self.tries <= SETTLING:
            raise ValueError(
                f"tries must be more than {SETTLING} steps, because the first do not count, got "
                f"{self.tries!r}"
            )

    def reduce(self, bucket: Bucket, comm: Comm) -> Reduced:
        scope = bucket.scope(PART)
        slots = bucket.layout.slots
        for slot in slots:
            scope.of(slot).setdefault("since", bucket.step)
        since = min((scope.of(slot)["since"] for slot in slots), default=0)
        turns = self._turns(())
        if bucket.step - since < len(turns):
            return self._try(turns[bucket.step - since], since, bucket, comm)
        if any("choice" not in scope.of(slot) for slot in slots):
            again = self._finalists(bucket, since, comm)
            turns = self._turns(again)
            if bucket.step - since < len(turns):
                return self._try(turns[bucket.step - since], since, bucket, comm)
            self._settle(bucket, since, again, comm)
        picked = {slot.name: int(scope.of(slot)["choice"]) for slot in slots}
        results = []
        for number, (name, reducer) in enumerate(self.choices):
            ours = tuple(slot for slot in slots if picked[slot.name] == number)
            if ours:
                thinner = float(scope.of(ours[0]).get("thinner", 1.0))
                # the whole layout, where it is one choice's, knows its runs already
                part = bucket.layout if ours == slots else Layout(ours, bucket.layout.numel)
                if thinner != 1.0:
                    reducer = rebuilt(reducer, partial(_thin, thinner, part, bucket.step))
                child = replace(bucket, layout=part).at(name)
                results.append((part, reducer.reduce(child, comm)))
        return join(bucket, results)

    @property
    def longest(self) -> int:
        """Steps after which a choice has been made."""
        return len(self._turns(())) * (2 if self.finals else 1)

    def traffic(self, layout: Layout, world: int, step: int = 0) -> Traffic:
        """While choices are tried; afterwards only the state knows, and the first is priced."""
        turns = self._turns(())
        _, reducer = self.choices[turns[step] if step < len(turns) else HOME]
        return reducer.traffic(layout, world, step)

    __repr__ = spell

    def _turns(self, again: Sequence[int]) -> list[int]:
        """Whose turn it is in every step of the trials; `again` are those who have another."""
        turns = []
        for choice in (*range(1, len(self.choices)), *again):
            half = self.tries // 2  # then even steps instead of odd ones, or the other way round
            turns += [choice, HOME] * half + [HOME] + [choice, HOME] * (self.tries - half)
        return turns

    def _try(self, choice: int, since: int, bucket: Bucket, comm: Comm) -> Reduced:
        trials = self._trials.setdefault(id(bucket.state), Trials())
        if bucket.step == since and since + 1 in trials.begun:  # of another run, or an older plan
            trials = self._trials[id(bucket.state)] = Trials()
        meter, now = meter_of(comm) or Metered(comm), time.perf_counter()
        waited, ready = meter.seconds, meter.ready or now
        if bucket.step not in trials.begun:
            trials.begun[bucket.step] = trials.ready = ready
        name, reducer = self.choices[choice]
        reduced = reducer.reduce(bucket.at(name), comm)
        end = time.perf_counter()
        first, exchange = max(now, meter.first or end), meter.seconds - waited
        trials.turns.setdefault(bucket.step, []).append(
            Turn(
                layout=bucket.layout,
                gap=max(0.0, ready - trials.ready),
                select=first - now,
                exchange=exchange,
                scatter=max(0.0, end - first - exchange),
            )
        )
        trials.ready = ready
        return reduced

    def _finalists(self, bucket: Bucket, since: int, comm: Comm) -> list[int]:
        """Who is tried again: found out once, on all ranks alike, and kept in the state."""
        scope = bucket.scope(PART)
        if not self.finals or not bucket.layout.slots:
            return []
        if any("finals" not in scope.of(slot) for slot in bucket.layout.slots):
            trials = self._read_trials(bucket, comm)
            seconds = _average_steps(trials, self._list_steps(since, []), comm)
            best = min((s for s in seconds if not math.isnan(s)), default=math.nan)
            near = [i for i, s in enumerate(seconds) if s <= (1 + self.finals) * best]
            marks = sum(1 << i for i in near if i != HOME) if len(near) > 1 else 0
            for slot in bucket.layout.slots:
                scope.of(slot)["finals"] = marks
        marks = int(scope.of(bucket.layout.slots[0])["finals"])
        return [i for i in range(len(self.choices)) if marks >> i & 1]

    def _list_steps(self, since: int, again: list[int]) -> list[list[int]]:
        """The steps of every choice that count: not the first of its turns."""
        steps: list[list[int]] = [[] for _ in self.choices]
        for number, choice in enumerate(self._turns(again)):
            steps[choice].append(since + number)
        for choice in range(1, len(self.choices)):
            steps[choice] = [s for i, s in enumerate(steps[choice]) if i % self.tries >= SETTLING]
        return steps

    def _read_trials(self, bucket: Bucket, comm: Comm) -> Trials:
        """With the begin of this step, which ends the last one that was tried."""
        trials = self._trials.setdefault(id(bucket.state), Trials())
        meter = meter_of(comm)
        ready = meter.ready if meter is not None else 0.0
        trials.begun.setdefault(bucket.step, ready or time.perf_counter())
        return trials

    def _settle(self, bucket: Bucket, since: int, again: list[int], comm: Comm) -> None:
        choice = self.decide(self._read_trials(bucket, comm), self._list_steps(since, again), comm)
        scope = bucket.scope(PART)
        for slot in bucket.layout.slots:
            scope.of(slot)["choice"], scope.of(slot)["thinner"] = choice(slot)

    @cached_property
    def _trials(self) -> dict[int, Trials]:
        """By the state they belong to: a recipe may serve several models, or ranks in threads."""
        return {}


@dataclass(frozen=True, kw_only=True)
class Fastest:
    """One choice for the whole model: the one with the shortest step.

    Home is preferred unless another is faster by more than `margin`. If nobody could take the time
    (a run that was broken off), it is home.
    """

    margin: float = 0.03

    def __call__(self, trials: Trials, counted: Sequence[Sequence[int]], comm: Comm) -> Assigned:
        seconds = _average_steps(trials, counted, comm)
        best = min(range(len(seconds)), key=lambda i: (math.isnan(seconds[i]), seconds[i]))
        near = not seconds[best] < (1 - self.margin) * seconds[HOME]
        pick = HOME if near else best
        return lambda slot: (pick, 1.0)


def _thin(factor: float, layout: Layout, step: int, part: Any) -> Any:
    return part.thin(factor, layout, step) if isinstance(part, Select) else part


def _average_steps(trials: Trials, counted: Sequence[Sequence[int]], comm: Comm) -> list[float]:
    """Seconds of a step of every choice: the median of those that count, averaged over ranks."""
    return average_over_ranks([_median(map(trials.step, steps)) for steps in counted], comm)


def average_over_ranks(numbers: list[float], comm: Comm) -> list[float]:
    """The mean over ranks, the same bits on all."""
    mine = torch.tensor(numbers, dtype=torch.float64)
    everyone = comm.all_gather(mine, [len(numbers)] * comm.size)
    means: list[float] = torch.stack(everyone).mean(dim=0).tolist()
    return means


def _median(numbers: Iterable[float]) -> float:
    known = [number for number in numbers if not math.isnan(number)]
    return statistics.median(known) if known else math.nan


def forget(slots: dict[str, dict[str, dict[str, Any]]]) -> int:
    """Drop every choice from the state of a run's parameters; how many there were."""
    found = 0
    for parts in slots.values():
        for path in [path for path in parts if path.split("/")[-1] == PART]:
            found += "choice" in parts.pop(path)
    return found
