"""How full the wire is while a verb runs: bytes sent / (rate x seconds), by verb and message size.

Large messages can all leave at once or in turns (`thinwire.comm.torch`); both forms are measured,
and gloo's ring beside them, so that the size from which on turns pay is a figure and no guess.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from thinwire.comm import torch as comm_torch
from thinwire.comm.metered import Metered, nbytes
from thinwire.comm.torch import TorchComm
from thinwire.plan import units
from thinwire_lab.local import workers

SIZES = (4_096, 65_536, 262_144, 1_048_576, 3_000_000, 12_500_000)  # bytes of the buffer
AT_ONCE, IN_TURNS = 1 << 62, 1


@dataclass(frozen=True, kw_only=True)
class Row:
    """One verb on one size."""

    verb: str
    size: int  # bytes of the buffer on a rank
    seconds: float  # median, on the slowest rank
    bytes_sent: float  # by a rank
    full: float | None  # share of the link's rate that was used; None if it has none


def measure(
    world: int, net: str, sizes: tuple[int, ...] = SIZES, turns: int = 7,
    on_report: Callable[[Any], None] = lambda message: None,
) -> list[Row]:  # fmt: skip
    """A row for every verb and size; on links of `net`, or on loopback."""
    rate = None if net == "none" else units.rate(net)
    found: list[list[tuple[str, int, float, float]]] = workers.run(
        world, _worker, sizes, turns, on_report=on_report, net=net
    )
    return [
        Row(
            verb=verb, size=size, seconds=seconds, bytes_sent=sent,
            full=None if rate is None else 8 * sent / rate / seconds,
        )
        for verb, size, seconds, sent in found[0]
    ]  # fmt: skip


def _verbs(comm: TorchComm, size: int) -> dict[str, tuple[Callable[[Any], object], int]]:
    """What is called, and from which message size on messages go in turns."""
    world, each = comm.size, max(1, size // 4 // comm.size)
    x = torch.zeros(each * world)
    parts = list(x.split(each))
    room = [torch.empty(each) for _ in range(world)]
    after, before = (comm.rank + 1) % world, (comm.rank - 1) % world
    same = [each] * world
    return {
        "all_to_all at once": (lambda c: c.all_to_all(parts, same), AT_ONCE),
        "all_to_all in turns": (lambda c: c.all_to_all(parts, same), IN_TURNS),
        "all_gather at once": (lambda c: c.all_gather(parts[0], same), AT_ONCE),
        "all_gather in turns": (lambda c: c.all_gather(parts[0], same), IN_TURNS),
        "gloo's all_gather": (lambda c: comm.group.allgather([room], [parts[0]]).wait(), 0),
        "all_reduce": (lambda c: c.all_reduce(x), 0),
        "exchange": (lambda c: c.exchange(x, after, before, x.numel()), 0),
    }


def _worker(
    rank: int, world: int, report: Any, sizes: tuple[int, ...], turns: int
) -> list[tuple[str, int, float, float]]:
    group = dist.group.WORLD
    assert group is not None
    comm, rows = TorchComm(group), []
    for size in sizes:
        verbs = _verbs(comm, size)
        taken: dict[str, list[float]] = {name: [] for name in verbs}
        sent = {}
        for turn in range(turns + 1):
            for name, (call, comm_torch.IN_TURNS) in verbs.items():
                meter = Metered(comm)
                comm.barrier()
                begin = time.perf_counter()
                call(meter)
                comm.barrier()
                if turn:  # the first is for warming up
                    taken[name].append(time.perf_counter() - begin)
                sent[name] = meter.bytes
        sent["gloo's all_gather"] = sent["all_gather at once"]
        slowest = _find_slowest(comm, [statistics.median(taken[name]) for name in verbs])
        rows += [(name, size, slowest[i], float(sent[name])) for i, name in enumerate(verbs)]
        report(size) if rank == 0 else None
    return rows


def _find_slowest(comm: TorchComm, seconds: list[float]) -> list[float]:
    mine = torch.tensor(seconds, dtype=torch.float64)
    everyone = comm.all_gather(mine, [nbytes(mine) // 8] * comm.size)
    slowest: list[float] = torch.stack(everyone).amax(dim=0).tolist()
    return slowest
