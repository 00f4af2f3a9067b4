"""What a step costs on this machine: the model's own backward, and a recipe's work for a bucket.

Measured on a live group, all ranks at once, so that what they take from each other's caches and
memory is in it; times are averaged over ranks, so that every rank gets the same numbers. With one
thread on a CPU they are seconds of processor time, which do not depend on who else is running.
"""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thinwire.bucket import Bucket
from thinwire.choose import average_over_ranks
from thinwire.combinators import Scheduled
from thinwire.comm.metered import Metered
from thinwire.describe import rebuilt
from thinwire.layout import Layout
from thinwire.protocols import Comm, Reducer
from thinwire.schedule import Flushed, Piecewise, Ramp

MB = 2**20
SCHEDULES = (Flushed, Piecewise, Ramp)
FIRST_MB = 1.0  # DDP's first bucket is smaller, so that sending begins early
STEPS, WARM = 5, 3
SAMPLES = 6  # buckets of different sizes that are measured; others are taken in proportion


@dataclass(frozen=True, kw_only=True)
class Model:
    """One step without any exchange: seconds of forward, of backward for each parameter in the
    order in which gradients are ready, and of the optimizer."""

    forward: float
    backward: tuple[tuple[str, float], ...]
    optimizer: float
    shapes: dict[str, torch.Size]

    @property
    def alone(self) -> float:
        return self.forward + sum(seconds for _, seconds in self.backward) + self.optimizer

    @property
    def numel(self) -> int:
        return sum(shape.numel() for shape in self.shapes.values())


@dataclass(frozen=True, kw_only=True)
class Cost:
    """A recipe's work for one bucket: processor seconds before the first verb, inside the verbs and
    after; what it called, as (verb, bytes sent), in so many steps; bytes it remembers; `floor` if
    it may send more (of a world that was priced, not measured)."""

    select: float
    effort: float
    scatter: float
    calls: tuple[tuple[str, int], ...]
    steps: int
    memory: int = 0
    floor: bool = False

    @property
    def sent(self) -> float:
        """Bytes per step."""
        return sum(sent for _, sent in self.calls) / self.steps

    def wire(self, seconds: Callable[[str, int], float]) -> float:
        """Seconds per step on the wire, of a network in which a call takes so long."""
        return sum(seconds(verb, sent) for verb, sent in self.calls) / self.steps

    def times(self, factor: float) -> Cost:
        """Of a bucket that is so many times larger."""
        calls = tuple((verb, round(sent * factor)) for verb, sent in self.calls)
        return Cost(
            select=self.select * factor, effort=self.effort * factor, scatter=self.scatter * factor,
            calls=calls, steps=self.steps, memory=round(self.memory * factor), floor=self.floor,
        )  # fmt: skip

    def among(self, world: int, measured: int, grows: float) -> Cost:
        """In a world of another size, in which `grows` times as much is sent: so is the work of
        sending it; and what comes from more ranks takes longer to write."""
        if world == measured or measured == 1:
            return self
        gathered = sum(sent for verb, sent in self.calls if verb == "all_gather")
        share = gathered / max(1, sum(sent for _, sent in self.calls))
        return replace(
            self,
            calls=tuple((verb, round(sent * grows)) for verb, sent in self.calls),
            effort=self.effort * grows,
            scatter=self.scatter * (1 + share * max(0.0, grows - 1) / 4),
        )


def median_cost(visits: Sequence[Cost]) -> Cost:
    """Of the same work measured several times: the medians, and all that was called."""
    return replace(
        visits[0],
        select=statistics.median(cost.select for cost in visits),
        effort=statistics.median(cost.effort for cost in visits),
        scatter=statistics.median(cost.scatter for cost in visits),
        calls=tuple(call for cost in visits for call in cost.calls),
        steps=sum(cost.steps for cost in visits),
    )


def freeze(recipe: Reducer, steps: int) -> Reducer:
    """The recipe with the mean of every schedule over so many steps.

    A few steps can be measured, and those at the start of a ramp are not like the rest.
    """

    def mean(part: Any) -> Any:
        if not isinstance(part, SCHEDULES):
            return part
        values = [part(step) for step in range(steps)]
        middle = statistics.fmean(values)
        return round(middle) if all(isinstance(value, int) for value in values) else middle

    if isinstance(recipe, Scheduled):
        numbers = {name: mean(number) for name, number in recipe.numbers}
        recipe = recipe.recipe(**dict(recipe.given), **numbers)
    frozen: Reducer = rebuilt(recipe, mean)
    return frozen


def measure_model(
    net: nn.Module, inputs: Sequence[Any], loss_of: Callable[[Any], Tensor], comm: Comm
) -> Model:
    """Measure forward, backward and an SGD step of a plain module."""
    names = {name: p for name, p in net.named_parameters() if p.requires_grad}
    if not names:
        raise ValueError("the model has no parameter that is trained; there is nothing to plan")
    optimizer = torch.optim.SGD(names.values(), lr=1e-4)
    agree("model", ", ".join(f"{name} {tuple(p.shape)}" for name, p in names.items()), comm)
    arrivals: dict[str, float] = {}
    clock = _clock(next(iter(names.values())))
    hooks = [
        p.register_post_accumulate_grad_hook(lambda _, name=name: arrivals.update({name: clock()}))
        for name, p in names.items()
    ]
    rows = []
    for _ in range(WARM + STEPS):
        comm.barrier()
        arrivals.clear()
        begin = clock()
        loss = loss_of(net(*inputs))
        forward = clock()
        loss.backward()
        backward = clock()
        optimizer.step()
        optimizer.zero_grad()
        after = clock() - backward
        ready = [arrivals.get(name, backward) - forward for name in names]
        rows.append([forward - begin, after, *ready])
    for hook in hooks:
        hook.remove()
    medians = torch.tensor(rows[WARM:], dtype=torch.float64).median(dim=0).values
    forward, after, *ready = average_over_ranks(medians.tolist(), comm)
    order = sorted(zip(ready, names, strict=True))
    before = [0.0, *(when for when, _ in order)]
    gaps = tuple((name, when - last) for (when, name), last in zip(order, before, strict=False))
    shapes = {name: names[name].shape for _, name in order}
    return Model(forward=forward, backward=gaps, optimizer=after, shapes=shapes)


def buckets(model: Model, cap_mb: float = 25.0, first_mb: float = FIRST_MB) -> list[list[str]]:
    """The parameters of DDP's buckets, in the order in which they are sent."""
    names = [name for name, _ in model.backward]
    ghosts = [torch.empty(model.shapes[name], device="meta") for name in names]
    groups, _ = dist._compute_bucket_assignment_by_size(  # type: ignore[attr-defined]
        ghosts, [int(first_mb * MB), int(cap_mb * MB)]
    )
    return [[names[i] for i in group] for group in groups]


def measure_costs(
    recipe: Reducer, layouts: Sequence[Layout], comm: Comm, steps: int = STEPS
) -> list[Cost]:
    """What the recipe does for each of these buckets; alike ones are measured once."""
    measured = {_kind(one): _measure(recipe, one, comm, steps) for one in _sample(layouts)}
    sizes = {
        layout.numel: measured[_kind(layout)] for layout in layouts if _kind(layout) in measured
    }
    found = []
    for layout in layouts:
        if _kind(layout) in measured:
            found.append(measured[_kind(layout)])
        else:
            near = min(sizes, key=lambda numel: abs(numel - layout.numel))
            found.append(sizes[near].times(layout.numel / near))
    return found


def agree(what: str, text: str, comm: Comm) -> None:
    """A ValueError on every rank, if one of them has another text."""
    digest = hashlib.sha256(text.encode()).digest()[:8]
    mine = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
    everyone = comm.all_gather(mine, [mine.numel()] * comm.size)
    others = [rank for rank, theirs in enumerate(everyone) if not torch.equal(theirs, everyone[0])]
    if others:
        raise ValueError(
            f"ranks disagree on the {what}: rank {others[0]} has another than rank 0; give every "
            f"rank the same (this is rank {comm.rank}, with {text:.200})"
        )


def _sample(layouts: Sequence[Layout]) -> list[Layout]:
    """One of each kind; of many kinds, some from the smallest to the largest."""
    kinds = {_kind(layout): layout for layout in layouts}
    every = sorted(kinds.values(), key=lambda layout: layout.numel)
    if len(every) <= SAMPLES:
        return every
    return [every[i * (len(every) - 1) // (SAMPLES - 1)] for i in range(SAMPLES)]


def _kind(layout: Layout) -> tuple[Any, ...]:
    return tuple((slot.shape, slot.strides) for slot in layout.slots)


def _measure(recipe: Reducer, layout: Layout, comm: Comm, steps: int) -> Cost:
    draw = torch.Generator().manual_seed(comm.rank)
    state: dict[str, Any] = {}
    rows: list[list[float]] = []
    calls: list[tuple[str, int]] = []
    for step in range(1, WARM + steps + 1):  # the first step of a recipe may look around
        flat = torch.randn(layout.numel, generator=draw)
        bucket = Bucket(flat=flat, layout=layout, state=state, step=step, world=comm.size)
        meter = Metered(comm, trace=True)
        comm.barrier()
        begin, own, every = time.perf_counter(), time.thread_time(), time.process_time()
        with torch.no_grad():
            recipe.reduce(bucket, meter)
        own, every = time.thread_time() - own, time.process_time() - every
        wall = time.perf_counter() - begin
        before = (meter.first or begin + wall) - begin
        share = before / max(1e-9, wall - meter.seconds)
        if step > WARM:
            rows.append([own * share, max(0.0, every - own), own * (1 - share)])
            calls += [(event.verb, event.bytes) for event in meter.events or []]
    medians = [statistics.median(column) for column in zip(*rows, strict=True)]
    select, effort, scatter = average_over_ranks(medians, comm)
    return Cost(
        select=select, effort=effort, scatter=scatter, calls=tuple(calls), steps=steps,
        memory=_held(state),
    )  # fmt: skip


def _held(tree: Any) -> int:
    """Bytes of all tensors in a state."""
    if isinstance(tree, Tensor):
        return tree.numel() * tree.element_size()
    return sum(_held(value) for value in tree.values()) if isinstance(tree, dict) else 0


def _clock(like: Tensor) -> Callable[[], float]:
    """Seconds of this thread, where it alone does the work; else of the wall, device and all."""
    if like.device.type == "cpu":
        return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter

    def now() -> float:
        torch.accelerator.synchronize()
        return time.perf_counter()

    return now
