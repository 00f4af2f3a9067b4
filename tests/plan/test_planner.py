"""From costs to a choice: by hand, at the edges, and for a model of GPT-2 large's size."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import pytest
import torch

from thinwire.plan import network, planner
from thinwire.plan.planner import (
    DENSE,
    Setup,
    buffered,
    chosen,
    crossover,
    moved,
    ranked,
    reasons,
    verdict,
)
from thinwire.plan.prices import catalogue
from thinwire.plan.profile import Cost, Model, buckets
from thinwire.report.planned import table

SHAPES = {"b": torch.Size([1000]), "a": torch.Size([1000, 1000])}
MODEL = Model(forward=0.01, backward=(("b", 0.01), ("a", 0.02)), optimizer=0.0, shapes=SHAPES)
GROUPS = [["b"], ["a"]]


def cost(sent, select=0.0, verb="all_gather"):
    return Cost(select=select, effort=0.0, scatter=0.0, calls=((verb, sent),), steps=1)


def setup(rate="1gbit", cores=2.0):
    links = network.given(rate, "10us", 4)
    return Setup(model=MODEL, groups=GROUPS, network=links, cores=cores)


COSTS = {
    DENSE: [cost(6_000, verb="all_reduce"), cost(6_000_000, verb="all_reduce")],
    "topk(density=0.01)": [cost(240), cost(240_000, select=0.005)],
    "bf16()": [cost(3_000), cost(3_000_000)],
}


def test_a_step_by_hand():
    option = planner.predicted(DENSE, setup(), COSTS[DENSE])
    wire = 6 * 10e-6 + 6e6 * 8e-9
    assert option.step == pytest.approx(0.04 + wire)
    assert option.timeline.exposed == pytest.approx(wire)
    assert option.sent == 6_006_000


def test_what_all_buckets_remember_is_added_up():
    costs = [replace(cost(10), memory=n) for n in (4_000, 4_000_000)]
    assert planner.predicted(DENSE, setup(), costs).memory == 4_004_000


def test_a_buffer_costs_selection_work_and_writing_too():
    """All in one buffer, of costs in proportion to the size: nothing hides behind backward."""
    costs = [
        Cost(select=1e-7 * n, effort=2e-6 * n, scatter=3e-7 * n, calls=(("exchange", n),), steps=1)
        for n in (1_000, 1_000_000)
    ]
    (step,) = (s for name, _, s in buffered(DENSE, setup(), costs) if name == "1000 MB")
    assert step == pytest.approx(0.01 + 0.03 + 1_001_000 * (1e-7 + 2e-6 + 3e-7), rel=1e-3)


def test_costs_of_several_steps_are_those_of_one():
    """Calls are of all the steps that were measured; a prediction is of one."""
    once = COSTS["topk(density=0.01)"]
    often = [replace(cost, calls=cost.calls * 5, steps=5) for cost in once]
    one, same = (planner.predicted("topk(density=0.01)", setup(), c) for c in (once, often))
    assert [work.wire for work in same.works] == pytest.approx([work.wire for work in one.works])
    assert same.sent == one.sent and same.step == pytest.approx(one.step)
    plans = [{name: step for name, _, step in buffered("topk(density=0.01)", setup(), costs)}
             for costs in (once, often)]  # fmt: skip
    assert plans[0] == pytest.approx(plans[1])


def test_slow_links_want_less_bytes_and_fast_ones_do_not_care():
    slow = ranked(setup("100mbit"), COSTS)
    assert [option.recipe for option in slow] == ["topk(density=0.01)", "bf16()", DENSE]
    assert verdict(slow).startswith("Use topk(density=0.01)")
    fast = ranked(setup("1000gbit"), COSTS)
    assert chosen(fast).recipe == DENSE
    assert verdict(fast).startswith("Stay dense")


def test_sixteen_bits_are_enough_where_they_are():
    costs = COSTS | {"bf16()": [cost(10), cost(10)]}
    options = ranked(setup("100mbit"), costs)
    assert chosen(options).recipe == "bf16()" and verdict(options).startswith("16-bit is enough")


def test_the_crossover_is_where_both_are_equal():
    bits = crossover("topk(density=0.01)", setup(), COSTS)
    assert 1e8 < bits < 1e11

    def gain(rate):
        there = setup(f"{rate:.0f}bit")
        steps = [planner.predicted(call, there, COSTS[call]).step for call in list(COSTS)[:2]]
        return steps[0] / steps[1]

    assert gain(bits) == pytest.approx(1.0, abs=0.02)
    assert gain(bits / 10) > 1 > gain(bits * 10)
    never = COSTS | {"topk(density=0.01)": [cost(10**9, select=1), cost(10**9, select=1)]}
    assert crossover("topk(density=0.01)", setup(), never) == 0
    always = COSTS | {"topk(density=0.01)": [cost(0), cost(0)]}
    assert math.isinf(crossover("topk(density=0.01)", setup(), always)) or crossover(
        "topk(density=0.01)", setup(), always
    )


def test_reasons_name_every_bucket():
    options = {option.recipe: option for option in ranked(setup("100mbit"), COSTS)}
    lines = reasons(options["topk(density=0.01)"], options[DENSE])
    assert len(lines) == 2 and "pays" in lines[1] and "5.0 ms more work" in lines[1]
    alike = {call: [replace(one, effort=0.001, scatter=0.002) for one in costs]
             for call, costs in COSTS.items()}  # fmt: skip
    options = {option.recipe: option for option in ranked(setup("100mbit"), alike)}
    assert reasons(options["topk(density=0.01)"], options[DENSE]) == lines  # all have that work


def test_costs_move_to_another_world_as_the_recipe_prices_itself():
    costs = [cost(3 * 80), cost(3 * 80_000)]
    there = moved("topk(density=0.01)", MODEL, GROUPS, costs, 8, 4)
    assert there[1].sent == pytest.approx(7 * 80_000, rel=0.01)
    dense = moved(DENSE, MODEL, GROUPS, COSTS[DENSE], 8, 4)
    assert dense[1].sent == pytest.approx(6_000_000 * (7 / 8) / (3 / 4), rel=0.01)
    assert moved(DENSE, MODEL, GROUPS, COSTS[DENSE], 4, 4) == COSTS[DENSE]


def test_what_was_priced_by_a_floor_says_so():
    """Measured here it is what it is; in another world it is at least that."""
    costs = [cost(3 * 80), cost(3 * 80_000)]
    for recipe, floor in (("redsync()", True), ("topk()", False)):
        for world in (4, 8):
            there = moved(recipe, MODEL, GROUPS, costs, world, 4)
            option = planner.predicted(recipe, setup(), there)
            assert option.floor == (floor and world == 8)
            row = table([option], option)[1]
            assert row[4].startswith(">= ") == option.floor
    assert {e.name for e in catalogue(10**6, 4, 0.01, 4) if e.floor} == {
        "gaussiank", "oktopk", "redsync", "sidco",
    }  # fmt: skip


def gpt2_large():
    """36 blocks of width 1280 and the embeddings: 774 M parameters in 436 tensors."""
    d, shapes = 1280, {}
    for block in reversed(range(36)):
        for name, shape in {
            "mlp.proj.bias": (d,), "mlp.proj.weight": (4 * d, d), "mlp.fc.bias": (4 * d,),
            "mlp.fc.weight": (d, 4 * d), "ln2.bias": (d,), "ln2.weight": (d,),
            "attn.proj.bias": (d,), "attn.proj.weight": (d, d), "attn.qkv.bias": (3 * d,),
            "attn.qkv.weight": (d, 3 * d), "ln1.bias": (d,), "ln1.weight": (d,),
        }.items():  # fmt: skip
            shapes[f"{block}.{name}"] = torch.Size(shape)
    shapes |= {"wpe": torch.Size([1024, d]), "wte": torch.Size([50257, d])}
    times = tuple((name, 1e-9 * shape.numel()) for name, shape in shapes.items())
    return Model(forward=0.4, backward=times, optimizer=0.05, shapes=shapes)


def test_a_plan_for_gpt2_large_takes_seconds():
    begin = time.process_time()
    model = gpt2_large()
    assert 770e6 < model.numel < 780e6
    groups = buckets(model)
    sizes = [sum(model.shapes[name].numel() for name in group) for group in groups]
    costs = {
        DENSE: [cost(6 * n, verb="all_reduce") for n in sizes],
        "topk(density=0.01)": [cost(n // 4, select=1e-9 * n) for n in sizes],
        "acpsgd(rank=4)": [cost(n // 40, select=1e-9 * n, verb="all_reduce") for n in sizes],
    }
    links = network.given("10gbit", "30us", 8)
    options = ranked(Setup(model=model, groups=groups, network=links, cores=2.0), costs)
    assert len(groups) > 50 and options[-1].recipe == DENSE
    moved("acpsgd(rank=4)", model, groups, costs["acpsgd(rank=4)"], 64, 8)
    assert time.process_time() - begin < 30
    there = Setup(model=model, groups=groups, network=links, cores=2.0)
    plans = buffered("topk(density=0.01)", there, costs["topk(density=0.01)"])
    assert sum(plans[0][1]) == len(model.backward)
    assert time.process_time() - begin < 30


def test_buffers_are_planned_from_the_same_timeline():
    shapes = {f"p{i}": torch.Size([10_000]) for i in range(20)}
    model = Model(
        forward=0.0, backward=tuple((name, 1e-3) for name in shapes), optimizer=0.0, shapes=shapes
    )
    groups = [[f"p{i}" for i in range(10)], [f"p{i}" for i in range(10, 15)],
              [f"p{i}" for i in range(15, 20)]]  # fmt: skip

    def plans(alpha):
        links = network.given("1000gbit", alpha, 4)
        there = Setup(model=model, groups=groups, network=links, cores=2.0)
        costs = [cost(6 * 10_000 * len(group), verb="all_reduce") for group in groups]
        return {name: (counts, step) for name, counts, step in buffered(DENSE, there, costs)}

    dear, cheap = plans("100ms"), plans("1ns")
    assert min(dear.values(), key=lambda plan: plan[1])[0] == [20]  # one message
    assert dear["MG-WFBP"][0] == [20]
    assert cheap["MG-WFBP"][0] == [1] * 20
    assert cheap["MG-WFBP"][1] <= cheap["1000 MB"][1] + 1e-9
    for counts, step in (*dear.values(), *cheap.values()):
        assert sum(counts) == 20 and step >= 0.02
