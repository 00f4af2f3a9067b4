"""What a trace shows: who sends how much to whom, in which phase, in messages of what size.

Also the three files it is exported to: a row a message (CSV), everything (JSON), and a Chrome trace
(open it in chrome://tracing or Perfetto).
"""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from thinwire_lab.trace.record import Trace


@dataclass(frozen=True, kw_only=True)
class Phase:
    """One phase of the algorithm, averaged over the steps that had it."""

    name: str
    verb: str
    steps: int  # that had it
    calls: float  # a rank, in such a step
    bytes: float  # of the mean rank, in such a step
    imbalance: float  # the busiest rank's bytes beside the mean
    seconds: float  # of the mean rank, in such a step


def matrix(trace: Trace) -> list[list[float]]:
    """Bytes a step from each rank (row) to each (column)."""
    world, steps = trace.setting.world, trace.setting.steps
    table = [[0.0] * world for _ in range(world)]
    for rank, events in enumerate(trace.events):
        for event in events:
            for peer, size in event.sent:
                table[rank][peer] += size / steps
    return table


def sizes(trace: Trace) -> list[tuple[int, int]]:
    """How many messages have up to 2^i bytes and more than half of that."""
    found = Counter(
        (max(1, size) - 1).bit_length()
        for events in trace.events
        for event in events
        for _, size in event.sent
    )
    if not found:
        return []
    return [(2**power, found[power]) for power in range(min(found), max(found) + 1)]


def phases(trace: Trace) -> list[Phase]:
    """In the order in which they first came."""
    order = dict.fromkeys((e.phase, e.verb) for events in trace.events for e in events)
    rows = []
    for name, verb in order:
        mine = [[e for e in ev if (e.phase, e.verb) == (name, verb)] for ev in trace.events]
        steps = len({e.step for ev in mine for e in ev})
        sent = [sum(e.bytes for e in ev) for ev in mine]
        mean = sum(sent) / len(sent)
        rows.append(Phase(
            name=name,
            verb=verb,
            steps=steps,
            calls=sum(len(ev) for ev in mine) / len(mine) / steps,
            bytes=mean / steps,
            imbalance=max(sent) / mean if mean else 1.0,
            seconds=sum(e.seconds for ev in mine for e in ev) / len(mine) / steps,
        ))  # fmt: skip
    return rows


def seconds(trace: Trace) -> float:
    """A step's time in exchanges, without waiting for ranks that came late.

    Each call is counted from when the last rank entered its call of the same number. Where ranks
    make different numbers of calls (a tree) only their own clocks are left: the slowest is taken.
    """
    taken = 0.0
    for step in range(trace.setting.steps):
        calls = [[e for e in events if e.step == step] for events in trace.events]
        if len({len(mine) for mine in calls}) > 1:
            taken += max(sum(e.seconds for e in mine) for mine in calls)
            continue
        for together in zip(*calls, strict=True):
            ends = [e.begin + e.seconds for e in together]
            taken += max(0.0, max(ends) - max(e.begin for e in together))
    return taken / trace.setting.steps


def waiting(trace: Trace) -> float:
    """A step's time in exchanges as the busiest rank has it, waiting included."""
    steps = trace.setting.steps
    return max(sum(e.seconds for e in events) for events in trace.events) / steps


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A figure as priced and as metered, both a step, of the busiest rank."""

    what: str
    predicted: float
    measured: float


def predictions(trace: Trace) -> list[Prediction]:
    """Bytes and rounds as `traffic()` has them, and seconds by the alpha-beta model."""
    steps = trace.setting.steps
    sent = max(sum(e.bytes for e in events) for events in trace.events) / steps
    rounds = max(len(events) for events in trace.events) / steps
    priced = trace.priced
    return [
        Prediction(what="bytes", predicted=sum(p.bytes for p in priced) / steps, measured=sent),
        Prediction(what="rounds", predicted=sum(p.rounds for p in priced) / steps, measured=rounds),
        Prediction(
            what="seconds", predicted=sum(map(trace.seconds, range(steps))) / steps,
            measured=seconds(trace),
        ),
    ]  # fmt: skip


def as_csv(trace: Trace) -> str:
    """A row a message; a call that sends nothing (a receive) has a row without a peer."""
    out = io.StringIO()
    rows = csv.writer(out)
    rows.writerow(["rank", "step", "phase", "verb", "peer", "bytes", "begin", "seconds"])
    start = _start(trace)
    for rank, events in enumerate(trace.events):
        for e in events:
            for peer, size in e.sent or (("", 0),):
                begin = f"{e.begin - start:.6f}"
                rows.writerow(
                    [rank, e.step, e.phase, e.verb, peer, size, begin, f"{e.seconds:.6f}"]
                )
    return out.getvalue()


def as_json(trace: Trace) -> str:
    start = _start(trace)
    events = [
        {**asdict(e), "rank": rank, "begin": e.begin - start, "sent": [list(s) for s in e.sent]}
        for rank, events in enumerate(trace.events)
        for e in events
    ]
    everything = {
        "setting": asdict(trace.setting),
        "params": trace.params,
        "alpha": trace.alpha,
        "beta": trace.beta,
        "matrix": matrix(trace),
        "message_sizes": sizes(trace),
        "phases": [asdict(phase) for phase in phases(trace)],
        "predictions": [asdict(prediction) for prediction in predictions(trace)],
        "events": events,
    }
    return json.dumps(everything, indent=1) + "\n"


def as_chrome(trace: Trace) -> str:
    """A thread a rank, a box a call."""
    start = _start(trace)
    boxes: list[dict[str, Any]] = [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": rank, "args": {"name": f"rank {rank}"}}
        for rank in range(trace.setting.world)
    ]
    for rank, events in enumerate(trace.events):
        boxes += [
            {
                "name": e.phase,
                "cat": e.verb,
                "ph": "X",
                "ts": round((e.begin - start) * 1e6, 1),
                "dur": round(e.seconds * 1e6, 1),
                "pid": 0,
                "tid": rank,
                "args": {"step": e.step, "bytes": e.bytes, "to": dict(e.sent)},
            }
            for e in events
        ]
    return json.dumps({"traceEvents": boxes, "displayTimeUnit": "ms"}) + "\n"


def _start(trace: Trace) -> float:
    """When the first call began: processes of one machine share this clock."""
    return min((events[0].begin for events in trace.events if events), default=0.0)
