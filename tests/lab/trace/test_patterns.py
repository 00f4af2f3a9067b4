"""Traces: what is shown adds up to what was metered, and what is exported reads back."""

from __future__ import annotations

import csv
import io
import json

import pytest
import torch

from thinwire import Bucket, recipes
from thinwire.comm import local
from thinwire.comm.metered import Event, Metered
from thinwire_lab.trace import patterns
from thinwire_lab.trace.record import Setting, Trace, ping

STEPS = 3


def traced(call: str, world: int) -> tuple[Trace, list[int]]:
    """A trace of threads, and the bytes each rank's meter counted."""
    recipe, states = recipes.parse(call), [{} for _ in range(world)]

    def worker(comm):
        meter = Metered(comm, trace=True)
        for step in range(STEPS):
            meter.step = step
            meter.start()
            draw = torch.Generator().manual_seed(10 * step + comm.rank)
            grads = {"w": torch.randn(40, 50, generator=draw)}
            bucket = Bucket.of(grads, state=states[comm.rank], step=step)
            recipe.reduce(bucket, meter)
        prices = tuple(recipe.traffic(bucket.layout, world, step) for step in range(STEPS))
        return tuple(meter.events), meter.bytes, prices

    events, sizes, priced = zip(*local.run(world, worker), strict=True)
    setting = Setting(call=call, world=world, params=2000, steps=STEPS)
    trace = Trace(
        setting=setting, params=2000, events=events, priced=priced[0], alpha=1e-4, beta=1e-8
    )
    return trace, list(sizes)


CALLS = ["dense()", "topk()", "gtopk()", "gtopk(tree=True)", "topkdsa()", "slots()", "spardl()",
         "oktopk()", "half()"]  # fmt: skip


@pytest.mark.parametrize("world", [1, 4, 5])
@pytest.mark.parametrize("call", CALLS)
def test_every_byte_is_in_the_matrix_the_phases_and_the_files(call, world):
    trace, metered = traced(call, world)
    table = patterns.matrix(trace)
    assert [round(sum(row) * STEPS) for row in table] == metered
    assert all(table[rank][rank] == 0 for rank in range(world))
    phases = patterns.phases(trace)
    by_phase = sum(phase.bytes * phase.steps for phase in phases) * world
    assert by_phase == pytest.approx(sum(metered))
    assert all(phase.imbalance >= 1.0 - 1e-9 for phase in phases)
    messages = [event for events in trace.events for e in events for event in e.sent]
    assert sum(count for _, count in patterns.sizes(trace)) == len(messages)
    rows = list(csv.DictReader(io.StringIO(patterns.as_csv(trace))))
    assert sum(int(row["bytes"]) for row in rows) == sum(metered)
    everything = json.loads(patterns.as_json(trace))
    assert everything["matrix"] == table
    assert len(everything["events"]) == sum(len(events) for events in trace.events)
    boxes = [b for b in json.loads(patterns.as_chrome(trace))["traceEvents"] if b["ph"] == "X"]
    assert sum(box["args"]["bytes"] for box in boxes) == sum(metered)
    assert min((box["ts"] for box in boxes), default=0.0) == 0.0


def test_phases_have_the_names_of_the_algorithm():
    names = {call: [p.name for p in patterns.phases(traced(call, 4)[0])] for call in CALLS}
    assert names["dense()"] == ["average"]
    assert names["topk()"] == ["gather"]
    assert names["gtopk()"] == ["hop 1", "hop 2"]
    assert names["slots()"] == ["cut", "split", "gather"]
    assert names["spardl()"] == ["hop 2", "hop 1", "gather"]
    assert set(names["gtopk(tree=True)"]) == {"up", "down"}


def test_predictions_stand_beside_measurements():
    trace, metered = traced("slots()", 4)
    found = {p.what: p for p in patterns.predictions(trace)}
    assert found["bytes"].predicted == found["bytes"].measured == max(metered) / STEPS
    assert found["rounds"].predicted == found["rounds"].measured
    priced = trace.priced[1]
    assert trace.seconds(1) == pytest.approx(priced.rounds * 1e-4 + priced.bytes * 1e-8)


def test_waiting_for_a_late_rank_is_not_the_networks_time():
    def event(begin, seconds):
        return Event(step=0, phase="p", verb="all_gather", begin=begin, seconds=seconds, sent=())

    setting = Setting(call="topk()", world=2, steps=1)
    late = ((event(0.0, 1.0),), (event(0.9, 0.15),))
    trace = Trace(setting=setting, params=1, events=late, priced=(), alpha=0.0, beta=0.0)
    assert patterns.seconds(trace) == pytest.approx(0.15)
    assert patterns.waiting(trace) == pytest.approx(1.0)


def test_a_message_size_is_in_the_bin_below_its_power_of_two():
    sent = ((1, 1), (2, 2), (3, 3), (4, 1024), (5, 1025))
    one = Event(step=0, phase="p", verb="exchange", begin=0.0, seconds=0.0, sent=sent)
    setting = Setting(call="topk()", world=6, steps=1)
    trace = Trace(setting=setting, params=1, events=((one,),), priced=(), alpha=0.0, beta=0.0)
    counted = dict(patterns.sizes(trace))
    assert counted[1] == 1 and counted[2] == 1 and counted[4] == 1
    assert counted[1024] == 1 and counted[2048] == 1


def test_ping_knows_a_network_of_threads():
    for world in (1, 3):
        results = local.run(world, ping)
        assert all(result == results[0] for result in results)
