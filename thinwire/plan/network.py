"""What a network costs: for every verb, so many seconds per message and so many per byte.

    seconds = alpha * messages + beta * bytes           as textbook algorithms count them

`probe` fits both on a live group, `from_rate` takes them from a data sheet, `load` from a file that
`save` has written. All ranks of a group get the same numbers.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from operator import mul
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thinwire.comm.metered import Metered
from thinwire.partial import interpolate
from thinwire.plan import units
from thinwire.protocols import Comm

FORMAT = "thinwire network 1"
VERBS = ("all_reduce", "all_gather", "all_to_all", "exchange")
SIZES = tuple(2**power for power in range(10, 25, 2))  # bytes of the buffer
PATIENCE = 0.4  # seconds of one call beyond which no larger size is tried
REPEATS = 7  # of a size; fewer where it takes long
Point = tuple[float, float, float]  # messages, bytes, seconds


@dataclass(frozen=True, kw_only=True)
class Line:
    """One verb: seconds per message, seconds per byte, the relative error of the fit (median).

    `points` are what was measured: bytes and seconds.
    """

    alpha: float
    beta: float
    error: float = 0.0
    points: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Network:
    """The lines of a group of `world` ranks, and where they come from."""

    world: int
    lines: Mapping[str, Line]
    source: str

    def __post_init__(self) -> None:
        if self.world < 1:
            raise ValueError(f"a network has at least one rank, got {self.world}")
        for verb in VERBS:
            line = self.lines[verb]
            if not (line.alpha >= 0 and line.beta >= 0):
                raise ValueError(f"{verb}: alpha and beta must not be negative, got {line}")

    def seconds(self, verb: str, sent: float) -> float:
        """A call of a verb in which this rank sends so many bytes."""
        if self.world == 1:
            return 0.0
        line = self.lines.get(verb, self.lines["all_gather"])
        if len(line.points) > 1 and sent >= line.points[0][0]:
            return interpolate(line.points, sent)  # real networks have bends that no line has
        return line.alpha * messages(verb, self.world) + line.beta * sent

    def at(self, world: int) -> Network:
        """The same links among more or fewer ranks: points were measured at one size of group."""
        if world == self.world:
            return self
        lines = {verb: replace(line, points=()) for verb, line in self.lines.items()}
        return replace(self, world=world, lines=lines)

    def at_rate(self, bits: float) -> Network:
        """The same messages over links of another rate, at which no points were measured."""
        beta = 8 / bits
        lines = {v: replace(line, beta=beta, points=()) for v, line in self.lines.items()}
        return replace(self, lines=lines)


def messages(verb: str, world: int) -> int:
    """Messages one after the other."""
    rounds = {"all_reduce": 2 * (world - 1), "exchange": 1, "barrier": 2 * (world - 1)}
    return rounds.get(verb, world - 1)


def from_rate(rate: str, latency: str, world: int) -> Network:
    """Links of a rate, a latency per message."""
    line = Line(alpha=units.seconds(latency), beta=8 / units.rate(rate))
    return Network(world=world, lines=dict.fromkeys(VERBS, line), source=f"{rate}, {latency}")


def fit(points: Sequence[Point]) -> Line:
    """The line of least squares of relative errors, neither of its numbers negative."""
    x = [m / t for m, _, t in points]  # relative: an error of a tenth counts alike for all sizes
    y = [b / t for _, b, t in points]
    xx, xy, yy = (math.fsum(map(mul, *pair)) for pair in ((x, x), (x, y), (y, y)))
    det = xx * yy - xy * xy
    alpha = (sum(x) * yy - sum(y) * xy) / det if det else -1.0
    beta = (sum(y) * xx - sum(x) * xy) / det if det else -1.0
    if alpha < 0:
        alpha, beta = 0.0, sum(y) / yy
    elif beta < 0:
        alpha, beta = sum(x) / xx, 0.0
    off = [abs(alpha * m + beta * b - t) / t for m, b, t in points]
    pairs = tuple((b, t) for _, b, t in points)
    return Line(alpha=alpha, beta=beta, error=statistics.median(off), points=pairs)


def probe(comm: Comm, *, patience: float = PATIENCE, sizes: Sequence[int] = SIZES) -> Network:
    """Measure every verb on the live group."""
    if comm.size == 1:
        return replace(from_rate("1gbit", "1us", 1), source="a world of one")
    lines = {verb: fit(_points(verb, comm, patience, sizes)) for verb in VERBS}
    return Network(world=comm.size, lines=lines, source="probed")


def save(network: Network, path: Path) -> None:
    lines = {verb: asdict(line) for verb, line in network.lines.items()}
    data = {"format": FORMAT, "world": network.world, "source": network.source, "lines": lines}
    path.write_text(json.dumps(data, indent=1) + "\n")


def load(path: Path) -> Network:
    """What `save` has written; a ValueError for anything else."""
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read the probe {path}: {error}") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        found = data.get("format") if isinstance(data, dict) else type(data).__name__
        raise ValueError(
            f"{path} is no probe of this version ({FORMAT!r}), got {found!r}; measure again with "
            "thinwire plan --out DIR"
        )
    try:
        lines = {verb: _line(data["lines"][verb]) for verb in VERBS}
        return Network(world=int(data["world"]), lines=lines, source=f"{path.name}")
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"the probe {path} is damaged: {error!r}; measure again") from None


def _line(data: dict[str, Any]) -> Line:
    points = tuple((float(b), float(t)) for b, t in data.get("points", ()))
    numbers = {name: float(data[name]) for name in ("alpha", "beta", "error")}
    return Line(**numbers, points=points)


def _points(verb: str, comm: Comm, patience: float, sizes: Sequence[int]) -> list[Point]:
    points: list[Point] = []
    for size in sizes:
        call = _call(verb, comm, size)
        meter = Metered(comm)
        slowest = max(_timed(call, meter, comm, 1), 1e-6)
        repeats = max(2, min(REPEATS, round(patience / slowest)))
        seconds = _timed(call, meter, comm, repeats)
        points.append((messages(verb, comm.size), meter.bytes / (repeats + 1), seconds))
        if seconds > patience:
            break
    return points


def _timed(call: Callable[[Comm], object], meter: Metered, comm: Comm, repeats: int) -> float:
    """The median, on the rank on which it is largest."""
    taken = []
    for _ in range(repeats):
        comm.barrier()
        begin = time.perf_counter()
        call(meter)
        taken.append(time.perf_counter() - begin)
    mine = torch.tensor([statistics.median(taken)], dtype=torch.float64)
    return float(torch.cat(comm.all_gather(mine, [1] * comm.size)).max())


def _call(verb: str, comm: Comm, size: int) -> Callable[[Comm], object]:
    """The verb on a buffer of so many bytes; an exchange goes round the ring."""
    numbers = max(comm.size, size // 4)
    each = numbers // comm.size
    world, x = comm.size, torch.zeros(numbers)
    parts: list[Tensor] = [x[:each]] * world
    ahead, behind = (comm.rank + 1) % world, (comm.rank - 1) % world
    calls: dict[str, Callable[[Comm], object]] = {
        "all_reduce": lambda c: c.all_reduce(x),
        "all_gather": lambda c: c.all_gather(x[:each], [each] * world),
        "all_to_all": lambda c: c.all_to_all(parts, [each] * world),
        "exchange": lambda c: c.exchange(x, ahead, behind, numbers),
    }
    return calls[verb]
