"""From measurements to a choice: what each recipe would make of a step, which is best, and why."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch

from thinwire import recipes
from thinwire.layout import Layout
from thinwire.partial import line
from thinwire.plan import buffers
from thinwire.plan.network import Network
from thinwire.plan.profile import Cost, Model
from thinwire.plan.timeline import Timeline, Work, replay
from thinwire.protocols import Traffic

DENSE = "dense()"
SIXTEEN = ("bf16()", "half()")
CLOSE = 0.05  # a recipe that gains less than this over a simpler one is not worth it
CAPS = (1, 5, 10, 25, 50, 100, 1000)  # megabytes of gradient a buffer
COUNTS = (1, 4, 16, 64)  # gradients a buffer
RATES = (1e5, 1e13)  # bits a second between which a crossover is looked for


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What the choice is made for: a model in buckets, a network, and cores a worker."""

    model: Model
    groups: Sequence[Sequence[str]]
    network: Network
    cores: float


@dataclass(frozen=True, kw_only=True)
class Option:
    """One recipe: its step, bytes a rank sends and remembers, and the rate below which it beats
    dense (infinite: always, zero: never)."""

    recipe: str
    timeline: Timeline
    works: tuple[Work, ...]
    sent: float
    memory: int
    floor: bool = False  # more may be sent
    crossover: float = math.nan

    @property
    def step(self) -> float:
        return self.timeline.step


def layouts(model: Model, groups: Sequence[Sequence[str]]) -> list[Layout]:
    """The layouts of buckets of these parameters."""
    return [
        Layout.of({name: torch.empty(model.shapes[name], device="meta") for name in group})
        for group in groups
    ]


def moved(
    recipe: str, model: Model, groups: Sequence[Sequence[str]], costs: Sequence[Cost], world: int,
    measured: int,
) -> list[Cost]:  # fmt: skip
    """The costs in a world of another size, by what the recipe says that it would send there: at
    least that, where its price is a floor."""
    reducer = recipes.parse(recipe)
    found = []
    for layout, cost in zip(layouts(model, groups), costs, strict=True):
        here, there = (
            sum((reducer.traffic(layout, size, step) for step in (1, 2)), Traffic())
            for size in (measured, world)
        )
        grows = there.bytes / here.bytes if here.bytes else 1.0
        floor = there.floor and world != measured
        found.append(replace(cost.among(world, measured, grows), floor=floor))
    return found


def predicted(recipe: str, setup: Setup, costs: Sequence[Cost]) -> Option:
    """The step of a model whose buckets cost so much each."""
    backward, links = dict(setup.model.backward), setup.network
    works = tuple(
        Work(
            name=f"bucket {number}",
            backward=sum(backward[name] for name in group),
            select=cost.select,
            wire=sum(links.seconds(verb, sent) for verb, sent in cost.calls) / cost.steps,
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


def ranked(setup: Setup, costs: Mapping[str, Sequence[Cost]]) -> list[Option]:
    """Every recipe, the fastest first; `dense()` must be among them."""
    options = []
    for recipe, each in costs.items():
        crossing = crossover(recipe, setup, costs)
        options.append(replace(predicted(recipe, setup, each), crossover=crossing))
    return sorted(options, key=lambda option: option.step)


def buffered(
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
    wires = [
        sum(links.seconds(verb, sent) for verb, sent in cost.calls) / cost.steps for cost in costs
    ]
    send = _line(bucket_sizes, wires)
    ready = list(accumulate(seconds for _, seconds in model.backward))
    plans = {f"{mb} MB": buffers.by_bytes([4 * n for n in sizes], mb * 2**20) for mb in CAPS}
    plans |= {f"{count} a buffer": buffers.by_count(len(names), count) for count in COUNTS}
    plans["MG-WFBP"] = buffers.merged(sizes, ready, send)
    plans["OMGS"] = buffers.merged_sparse(sizes, ready, select, send)
    plans["overlapped"] = buffers.overlapped(sizes, ready, select, send)
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


def crossover(recipe: str, setup: Setup, costs: Mapping[str, Sequence[Cost]]) -> float:
    """The rate of links, bits a second, up to which this recipe beats dense."""

    def loses(bits: float) -> bool:
        there = replace(setup, network=setup.network.at_rate(bits))
        mine = predicted(recipe, there, costs[recipe]).step
        return mine >= predicted(DENSE, there, costs[DENSE]).step

    low, high = RATES
    if loses(low):
        return 0.0
    if not loses(high):
        return math.inf
    while high / low > 1.05:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if loses(middle) else (middle, high)
    return math.sqrt(low * high)


def chosen(options: Sequence[Option]) -> Option:
    """The fastest, unless something simpler is about as fast: dense first, then 16 bits."""
    best = min(options, key=lambda option: option.step)
    for simpler in (DENSE, *SIXTEEN):
        for option in options:
            if option.recipe == simpler and option.step <= best.step * (1 + CLOSE):
                return option
    return best


def verdict(options: Sequence[Option]) -> str:
    """The answer in a sentence or two."""
    best = chosen(options)
    dense = next(option for option in options if option.recipe == DENSE)
    gain = dense.step / best.step
    if best is dense:
        other = min((o for o in options if o is not dense), key=lambda o: o.step, default=dense)
        hidden = f"backward waits {1e3 * dense.timeline.exposed:.1f} ms for it"
        return (
            f"Stay dense: {hidden}, and the best other, {other.recipe}, would take "
            f"{other.step / dense.step:.2f} times the step."
        )
    if best.recipe in SIXTEEN:
        return f"16-bit is enough: {best.recipe} is {gain:.2f} times faster than dense."
    return f"Use {best.recipe}: {gain:.2f} times faster than dense."


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
