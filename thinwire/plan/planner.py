"""From measurements to a choice: what each recipe would make of a step, which is best, and why."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, pairwise

import torch

from thinwire import evidence, recipes
from thinwire.evidence import Trial
from thinwire.layout import Layout
from thinwire.partial import line
from thinwire.plan import packing
from thinwire.plan.network import Network
from thinwire.plan.profile import Cost, Model, freeze
from thinwire.plan.timeline import Timeline, Work, replay
from thinwire.protocols import Reducer, Traffic

DENSE = "dense()"
SIXTEEN = ("bf16()", "half()")
SIMPLE = (DENSE, *SIXTEEN, "int8()")  # in this order, where they are about as fast as the fastest
CLOSE = 0.05  # a recipe that gains less than this over a simpler one is not worth it
CAPS = (1, 5, 10, 25, 50, 100, 1000)  # megabytes of gradient per buffer
COUNTS = (1, 4, 16, 64)  # gradients per buffer
RATES = (1e5, 1e13)  # bits per second between which a crossover is looked for


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What the choice is made for: a model in buckets, a network, cores per worker, a training.

    `steps` is the length of the training, over which schedules are averaged. Of the recorded
    trainings those with this `optimizer` count ("sgd" or "adam"), or all of them without one. A
    recipe that cost more than `tolerance` percent of accuracy is not recommended.
    """

    model: Model
    groups: Sequence[Sequence[str]]
    network: Network
    cores: float
    steps: int = 1000
    optimizer: str | None = None
    tolerance: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Option:
    """One recipe: its step, the bytes per rank that it sends and remembers, and what it costs.

    Below the rate `crossover` it beats dense (infinite: always, zero: never). `trials` are the
    recorded trainings; it `keeps` accuracy if the worst of them is within the tolerance.
    """

    recipe: str
    timeline: Timeline
    works: tuple[Work, ...]
    sent: float
    memory: int
    floor: bool = False  # more may be sent
    crossover: float = math.nan
    trials: tuple[Trial, ...] = ()
    keeps: bool = False

    @property
    def step(self) -> float:
        return self.timeline.step

    @property
    def worst(self) -> Trial | None:
        """The recorded training in which it cost most."""
        return evidence.worst(self.trials)


def layouts(model: Model, groups: Sequence[Sequence[str]]) -> list[Layout]:
    """The layouts of buckets of these parameters."""
    return [
        Layout.of({name: torch.empty(model.shapes[name], device="meta") for name in group})
        for group in groups
    ]


def move(recipe: str, setup: Setup, costs: Sequence[Cost], measured: int) -> list[Cost]:
    """Costs that were measured in a world of another size, as they would be in this one.

    They grow as the recipe says that its bytes grow: at least that, where its price is a floor.
    """
    reducer, world = _frozen(recipe, setup.steps), setup.network.world
    found = []
    for layout, cost in zip(layouts(setup.model, setup.groups), costs, strict=True):
        here, there = (
            sum((reducer.traffic(layout, size, step) for step in (1, 2)), Traffic())
            for size in (measured, world)
        )
        grows = there.bytes / here.bytes if here.bytes else 1.0
        floor = there.floor and world != measured
        found.append(replace(cost.among(world, measured, grows), floor=floor))
    return found


@cache
def _frozen(recipe: str, steps: int) -> Reducer:
    return freeze(recipes.parse(recipe), steps)


def predict(recipe: str, setup: Setup, costs: Sequence[Cost]) -> Option:
    """The step of a model whose buckets cost so much each."""
    backward, links = dict(setup.model.backward), setup.network
    works = tuple(
        Work(
            name=f"bucket {number}",
            backward=sum(backward[name] for name in group),
            select=cost.select,
            wire=cost.wire(links.seconds),
            effort=cost.effort,
            scatter=cost.scatter,
        )
        for number, (group, cost) in enumerate(zip(setup.groups, costs, strict=True))
    )
    forward, optimizer = setup.model.forward, setup.model.optimizer
    return Option(
        recipe=recipe,
        timeline=replay(works, forward=forward, optimizer=optimizer, cores=setup.cores),
        works=works,
        sent=sum(cost.sent for cost in costs),
        memory=sum(cost.memory for cost in costs),
        floor=any(cost.floor for cost in costs),
    )


def rank(setup: Setup, costs: Mapping[str, Sequence[Cost]]) -> list[Option]:
    """Every recipe: those that keep accuracy first, the fastest of them first of all.

    `dense()` must be among them: it keeps accuracy, and is what the others are compared with.
    """
    options = []
    for recipe, each in costs.items():
        trials = evidence.find(recipe, setup.optimizer)
        worst = evidence.worst(trials)
        keeps = recipe == DENSE or (worst is not None and worst.cost <= setup.tolerance)
        crossover = find_crossover(recipe, setup, costs)
        option = predict(recipe, setup, each)
        options.append(replace(option, crossover=crossover, trials=trials, keeps=keeps))
    return sorted(options, key=lambda option: (not option.keeps, option.step))


def plan_buffers(
    recipe: str, setup: Setup, costs: Sequence[Cost]
) -> list[tuple[str, list[int], float]]:
    """Plans of buffers for a recipe, by name, as counts of gradients, with the step that each would
    make: the fastest first. What a buffer costs is a straight line through the buckets' costs."""
    model, links = setup.model, setup.network
    names = [name for name, _ in model.backward]
    sizes = [model.shapes[name].numel() for name in names]
    bucket_sizes = [sum(model.shapes[name].numel() for name in group) for group in setup.groups]
    select, scatter, effort = (
        _line(bucket_sizes, [getattr(cost, part) for cost in costs])
        for part in ("select", "scatter", "effort")
    )
    send = _line(bucket_sizes, [cost.wire(links.seconds) for cost in costs])
    ready = list(accumulate(seconds for _, seconds in model.backward))
    plans = {f"{mb} MB": packing.by_bytes([4 * n for n in sizes], mb * 2**20) for mb in CAPS}
    plans |= {f"{count} per buffer": packing.by_count(len(names), count) for count in COUNTS}
    plans["MG-WFBP"] = packing.merge(sizes, ready, send)
    plans["OMGS"] = packing.merge_sparse(sizes, ready, select, send)
    plans["overlapped"] = packing.overlap(sizes, ready, select, send)
    found = []
    for name, counts in plans.items():
        ends = [0, *accumulate(counts)]
        works = []
        for first, last in pairwise(ends):
            n = sum(sizes[first:last])
            works.append(Work(
                backward=sum(seconds for _, seconds in model.backward[first:last]),
                select=select(n), wire=send(n), effort=effort(n), scatter=scatter(n),
            ))  # fmt: skip
        timeline = replay(
            works, forward=model.forward, optimizer=model.optimizer, cores=setup.cores
        )
        found.append((name, counts, timeline.step))
    return sorted(found, key=lambda plan: plan[2])


def _line(sizes: Sequence[int], seconds: Sequence[float]) -> Callable[[int], float]:
    """Seconds of n gradients: a straight line through what was measured."""
    start, slope = line(list(zip(sizes, seconds, strict=True)))
    return lambda n: start + slope * n


def find_crossover(recipe: str, setup: Setup, costs: Mapping[str, Sequence[Cost]]) -> float:
    """The rate of links, bits per second, up to which this recipe beats dense."""

    def loses(bits: float) -> bool:
        there = replace(setup, network=setup.network.at_rate(bits))
        mine = predict(recipe, there, costs[recipe]).step
        return mine >= predict(DENSE, there, costs[DENSE]).step

    low, high = RATES
    if loses(low):
        return 0.0
    if not loses(high):
        return math.inf
    while high / low > 1.05:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if loses(middle) else (middle, high)
    return math.sqrt(low * high)


def choose(options: Sequence[Option]) -> Option:
    """The fastest that keeps accuracy, unless something simpler is about as fast."""
    safe = [option for option in options if option.keeps]
    best = min(safe, key=lambda option: option.step)
    near = {option.recipe: option for option in safe if option.step <= best.step * (1 + CLOSE)}
    return next((near[simple] for simple in SIMPLE if simple in near), best)


def verdict(options: Sequence[Option], setup: Setup) -> str:
    """The answer in a few sentences, with what it costs in accuracy."""
    best = choose(options)
    dense = next(option for option in options if option.recipe == DENSE)
    said = [_stay(dense, options) if best is dense else _use(best, dense)]
    everyone = {evidence.family(trial.optimizer) for trial in evidence.trials()}
    missing = everyone - {evidence.family(trial.optimizer) for trial in best.trials}
    if setup.optimizer is None and best is not dense and missing:
        said.append(f"Under {', '.join(sorted(missing))} nobody recorded it.")
    risky = min((o for o in options if not o.keeps), key=lambda o: o.step, default=best)
    if risky.step < best.step:
        speed = f"{about(dense.step / risky.step)} faster than dense"
        said.append(f"Not recommended: {risky.recipe}, {speed}; cost in accuracy: {price(risky)}.")
    return " ".join(said)


def _use(best: Option, dense: Option) -> str:
    few = best.recipe in SIXTEEN
    name = f"16-bit is enough: {best.recipe} is" if few else f"Use {best.recipe}:"
    speed = f"{about(dense.step / best.step)} faster than dense"
    return f"{name} {speed}; cost in accuracy: {price(best)}."


def _stay(dense: Option, options: Sequence[Option]) -> str:
    hidden = f"backward waits {1e3 * dense.timeline.exposed:.1f} ms for it"
    others = [option for option in options if option.keeps and option is not dense]
    if not others:
        return f"Stay dense: {hidden}, and no other recipe here is known to keep accuracy."
    other = min(others, key=lambda option: option.step)
    times = about(other.step / dense.step)
    return f"Stay dense: {hidden}, and {other.recipe}, the best other, would take {times} the step."


def about(ratio: float) -> str:
    """A speed-up as far as it is known: two digits.

    >>> about(2.345), about(56.4), about(163.0)
    ('about 2.3 x', 'about 56 x', 'about 160 x')
    """
    return f"about {float(f'{ratio:.2g}'):g} x"


def price(option: Option) -> str:
    """What a recipe costs in accuracy, and where that was recorded."""
    if option.recipe == DENSE:
        return "none"
    if option.worst is None:
        return "unknown"
    trial, seeds = option.worst, "seed" if option.worst.seeds == 1 else "seeds"
    cost = round(trial.cost, 1) + 0.0  # no negative zero
    return f"{cost:+.1f} % ({trial.job}, {trial.optimizer}, {trial.seeds} {seeds})"


def reasons(option: Option, dense: Option) -> list[str]:
    """Why, bucket by bucket."""
    lines = []
    for mine, theirs in zip(option.works, dense.works, strict=True):
        spent = mine.select + mine.effort + mine.scatter - theirs.select - theirs.effort
        spent -= theirs.scatter
        saved = theirs.wire - mine.wire
        word = "pays" if saved > spent else "does not pay by itself"
        lines.append(
            f"{mine.name}: backward {_ms(mine.backward)}, on the wire {_ms(mine.wire)} instead of "
            f"{_ms(theirs.wire)}, {_ms(abs(spent))} {'more' if spent > 0 else 'less'} work: {word}"
        )
    return lines


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"
