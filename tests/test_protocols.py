"""Optional promises: listed with defaults in one place, and kept by parts that inherit nothing."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

import thinwire
from thinwire import Bucket
from thinwire.bucket import flat_indices, whole
from thinwire.collectives import AllGather, GTopK, Slots, SplitReduce
from thinwire.comm import local
from thinwire.comm.metered import Metered, meter_of
from thinwire.comm.pairwise import Pairwise
from thinwire.memory import MomentumCorrected, Residual
from thinwire.payload import together
from thinwire.protocols import (
    CollectivePromises,
    MemoryPromises,
    SelectorPromises,
    Traffic,
    promised,
)
from thinwire.reducers import Select
from thinwire.remember import Remember
from thinwire.schedule import Ramp
from thinwire.selectors.drift import Drifting
from thinwire.selectors.topk import topk

ROOT = Path(thinwire.__file__).parent


def first(rows, k, state):
    """The first entries of every row: a plain function."""
    columns = torch.arange(k).expand(rows.shape[0], k)
    return flat_indices(columns, rows)


class Everyone:
    """A collective that inherits nothing and promises nothing: counts may vary."""

    def sum(self, mine, k, step, link, state):
        return together(link.all_gather(mine, ragged=True), mine.numel), mine

    def traffic(self, k, n, world, wire, step=0):
        return Traffic(rounds=1, bytes=(world - 1) * wire.nbytes(k, n))


class Hoard(Everyone):
    keeps = "owner"


def test_who_says_nothing_gets_the_defaults():
    assert promised(SelectorPromises, first) == SelectorPromises()
    assert promised(CollectivePromises, Everyone()) == CollectivePromises()
    assert promised(MemoryPromises, object()) == MemoryPromises()
    assert CollectivePromises() == CollectivePromises(ragged=True, keeps="sender", reach=1.0)


def test_promises_are_read_from_constants_fields_and_properties():
    assert promised(SelectorPromises, topk).fused
    assert promised(SelectorPromises, Drifting()).capacity == 2.0
    assert promised(SelectorPromises, Drifting()).settle is not None
    assert not promised(CollectivePromises, AllGather()).ragged
    assert promised(CollectivePromises, GTopK(tree=True)).keeps == "owner"
    assert promised(CollectivePromises, Slots()).reach == 4.0
    assert promised(MemoryPromises, Residual(learning_rate=True)).learning_rate
    assert promised(MemoryPromises, MomentumCorrected()).corrects_momentum


@pytest.mark.parametrize("collective", [Everyone(), SplitReduce()])
def test_a_function_and_a_class_of_the_user_are_parts(collective):
    recipe = Remember(Select(pick=first, over=whole, density=0.25, collective=collective))

    def worker(comm):
        bucket = Bucket.of({"w": torch.arange(8.0) + comm.rank}, state={})
        reduced = recipe.reduce(bucket, comm)
        return reduced.mean, reduced.sent.add_into(torch.zeros(8))

    results = local.run(3, worker)
    mean = sum(sent for _, sent in results) / 3
    assert all(torch.equal(got, results[0][0]) for got, _ in results)
    assert torch.allclose(mean, results[0][0])
    assert mean.count_nonzero() == 2


def test_a_promise_of_the_user_is_heeded():
    inner = Select(pick=topk, collective=Hoard())
    with pytest.raises(ValueError, match="the owner of a region does"):
        Remember(inner, MomentumCorrected())


def test_a_thinner_select_keeps_fewer_and_leaves_alone_what_goes_whole():
    layout = Bucket.of({"w": torch.zeros(100)}, state={}).layout
    recipe = Select(pick=topk, density=Ramp(start=1.0, end=0.1, steps=10))
    assert recipe.thin(0.5, layout, 0) is recipe  # all of it is sent at that step
    assert recipe.thin(1.0, layout, 20) is recipe
    assert recipe.thin(0.5, layout, 20).density == pytest.approx(0.05)


def test_times_are_read_from_the_meter_under_a_comm():
    def worker(comm):
        meter = Metered(comm)
        meter.start(ready=7.0)
        group = Pairwise(Pairwise(meter), [0, 1])
        assert meter_of(group) is meter_of(meter) is meter
        assert meter_of(comm) is None
        return meter.ready

    assert local.run(2, worker) == [7.0, 7.0]


READERS = {"describe.py", "protocols.py"}  # of dataclass fields, and of promises
NAMED = {"__init__.py", "prices.py", "planner.py"}  # a name that is data
FOREIGN = {"model", "sys", "thing", "optimizer", "p", "recipe", "collective", "part"}


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: path.name)
def test_promises_are_read_in_one_place(path):
    if path.name in READERS | NAMED or "kernels" in path.parts:
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr":
            asked, name = ast.unparse(node.args[0]), ast.literal_eval(node.args[1])
            assert asked in FOREIGN, f"{path.name}: getattr of {asked}"
            known = (SelectorPromises, CollectivePromises, MemoryPromises)
            assert not any(name in kind.__dataclass_fields__ for kind in known), name


@pytest.mark.parametrize("path", sorted((ROOT / "collectives").glob("*.py")), ids=lambda p: p.name)
def test_collectives_hold_no_reducers(path):
    text = path.read_text()
    for module in ("combinators", "reducers", "remember", "route", "by_node", "choose"):
        assert f"thinwire.{module} " not in text
