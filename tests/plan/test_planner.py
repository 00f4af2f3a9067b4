"""From costs to a choice: by hand, at the edges, and for a model of GPT-2 large's size."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import pytest
import torch

from thinwire import evidence, recipes
from thinwire.evidence import Trial
from thinwire.plan import network, planner
from thinwire.plan.planner import (
    DENSE,
    Setup,
    choose,
    find_crossover,
    move,
    plan_buffers,
    rank,
    reasons,
    verdict,
)
from thinwire.plan.prices import catalogue
from thinwire.plan.profile import Cost, Model, buckets, freeze
from thinwire_lab.bench.measure import candidates
from thinwire_lab.report.advice import page, table, tables

SHAPES = {"b": torch.Size([1000]), "a": torch.Size([1000, 1000])}
MODEL = Model(forward=0.01, backward=(("b", 0.01), ("a", 0.02)), optimizer=0.0, shapes=SHAPES)
GROUPS = [["b"], ["a"]]
SPARSE = (  # its recorded cost is nothing, under SGD
    "gtopk(density=Flushed(Ramp(start=0.3, end=0.01, steps=750), 1000), "
    'memory=MomentumCorrected(learning_rate=True), wire="int8+auto")'
)
LOSSY = "acpsgd(rank=4)"  # 6.5 points of ResNet-20, 97 % of GPT-2's perplexity


def cost(sent, select=0.0, verb="all_gather"):
    return Cost(select=select, effort=0.0, scatter=0.0, calls=((verb, sent),), steps=1)


def setup(rate="1gbit", cores=2.0, world=4, **more):
    links = network.from_rate(rate, "10us", world)
    return Setup(model=MODEL, groups=GROUPS, network=links, cores=cores, **more)


COSTS = {
    DENSE: [cost(6_000, verb="all_reduce"), cost(6_000_000, verb="all_reduce")],
    SPARSE: [cost(240), cost(240_000, select=0.005)],
    "bf16()": [cost(3_000), cost(3_000_000)],
}


def test_a_step_by_hand():
    option = planner.predict(DENSE, setup(), COSTS[DENSE])
    wire = 6 * 10e-6 + 6e6 * 8e-9
    assert option.step == pytest.approx(0.04 + wire)
    assert option.timeline.exposed == pytest.approx(wire)
    assert option.sent == 6_006_000


def test_what_all_buckets_remember_is_added_up():
    costs = [replace(cost(10), memory=n) for n in (4_000, 4_000_000)]
    assert planner.predict(DENSE, setup(), costs).memory == 4_004_000


def test_a_buffer_costs_selection_work_and_writing_too():
    """All in one buffer, of costs in proportion to the size: nothing hides behind backward."""
    costs = [
        Cost(select=1e-7 * n, effort=2e-6 * n, scatter=3e-7 * n, calls=(("exchange", n),), steps=1)
        for n in (1_000, 1_000_000)
    ]
    (step,) = (s for name, _, s in plan_buffers(DENSE, setup(), costs) if name == "1000 MB")
    assert step == pytest.approx(0.01 + 0.03 + 1_001_000 * (1e-7 + 2e-6 + 3e-7), rel=1e-3)


def test_costs_of_several_steps_are_those_of_one():
    """Calls are of all the steps that were measured; a prediction is of one."""
    once = COSTS[SPARSE]
    often = [replace(cost, calls=cost.calls * 5, steps=5) for cost in once]
    one, same = (planner.predict(SPARSE, setup(), c) for c in (once, often))
    assert [work.wire for work in same.works] == pytest.approx([work.wire for work in one.works])
    assert same.sent == one.sent and same.step == pytest.approx(one.step)
    plans = [{name: step for name, _, step in plan_buffers(SPARSE, setup(), costs)}
             for costs in (once, often)]  # fmt: skip
    assert plans[0] == pytest.approx(plans[1])


def test_slow_links_want_less_bytes_and_fast_ones_do_not_care():
    slow = rank(setup("100mbit"), COSTS)
    assert [option.recipe for option in slow] == [SPARSE, "bf16()", DENSE]
    assert verdict(slow, setup()).startswith(f"Use {SPARSE}: about ")
    fast = rank(setup("1000gbit"), COSTS)
    assert choose(fast).recipe == DENSE
    assert verdict(fast, setup()).startswith("Stay dense")


def test_sixteen_bits_are_enough_where_they_are():
    costs = COSTS | {"bf16()": [cost(10), cost(10)]}
    options = rank(setup("100mbit"), costs)
    assert choose(options).recipe == "bf16()" and verdict(options, setup()).startswith(
        "16-bit is enough"
    )


def test_the_crossover_is_where_both_are_equal():
    bits = find_crossover(SPARSE, setup(), COSTS)
    assert 1e8 < bits < 1e11

    def gain(rate):
        there = setup(f"{rate:.0f}bit")
        steps = [planner.predict(call, there, COSTS[call]).step for call in list(COSTS)[:2]]
        return steps[0] / steps[1]

    assert gain(bits) == pytest.approx(1.0, abs=0.02)
    assert gain(bits / 10) > 1 > gain(bits * 10)
    never = COSTS | {SPARSE: [cost(10**9, select=1), cost(10**9, select=1)]}
    assert find_crossover(SPARSE, setup(), never) == 0
    always = COSTS | {SPARSE: [cost(0), cost(0)]}
    assert math.isinf(find_crossover(SPARSE, setup(), always)) or find_crossover(
        SPARSE, setup(), always
    )


def test_reasons_name_every_bucket():
    options = {option.recipe: option for option in rank(setup("100mbit"), COSTS)}
    lines = reasons(options[SPARSE], options[DENSE])
    assert len(lines) == 2 and "pays" in lines[1] and "5.0 ms more work" in lines[1]
    alike = {call: [replace(one, effort=0.001, scatter=0.002) for one in costs]
             for call, costs in COSTS.items()}  # fmt: skip
    options = {option.recipe: option for option in rank(setup("100mbit"), alike)}
    assert reasons(options[SPARSE], options[DENSE]) == lines  # all have that work


def test_costs_move_to_another_world_as_the_recipe_prices_itself():
    costs = [cost(3 * 80), cost(3 * 80_000)]
    there = move("topk(density=0.01)", setup(world=8), costs, 4)
    assert there[1].sent == pytest.approx(7 * 80_000, rel=0.01)
    dense = move(DENSE, setup(world=8), COSTS[DENSE], 4)
    assert dense[1].sent == pytest.approx(6_000_000 * (7 / 8) / (3 / 4), rel=0.01)
    assert move(DENSE, setup(), COSTS[DENSE], 4) == COSTS[DENSE]


def test_what_was_priced_by_a_floor_says_so():
    """Measured here it is what it is; in another world it is at least that."""
    costs = [cost(3 * 80), cost(3 * 80_000)]
    for recipe, floor in (("redsync()", True), ("topk()", False)):
        for world in (4, 8):
            there = move(recipe, setup(world=world), costs, 4)
            option = planner.predict(recipe, setup(), there)
            assert option.floor == (floor and world == 8)
            row = table([option], option)[1]
            assert row[5].startswith(">= ") == option.floor
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
    links = network.from_rate("10gbit", "30us", 8)
    here = Setup(model=model, groups=groups, network=links, cores=2.0)
    options = rank(here, costs)
    assert len(groups) > 50 and max(options, key=lambda option: option.step).recipe == DENSE
    move(LOSSY, replace(here, network=links.at(64)), costs[LOSSY], 8)
    assert time.process_time() - begin < 30
    plans = plan_buffers("topk(density=0.01)", here, costs["topk(density=0.01)"])
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
        links = network.from_rate("1000gbit", alpha, 4)
        there = Setup(model=model, groups=groups, network=links, cores=2.0)
        costs = [cost(6 * 10_000 * len(group), verb="all_reduce") for group in groups]
        return {name: (counts, step) for name, counts, step in plan_buffers(DENSE, there, costs)}

    dear, cheap = plans("100ms"), plans("1ns")
    assert min(dear.values(), key=lambda plan: plan[1])[0] == [20]  # one message
    assert dear["MG-WFBP"][0] == [20]
    assert cheap["MG-WFBP"][0] == [1] * 20
    assert cheap["MG-WFBP"][1] <= cheap["1000 MB"][1] + 1e-9
    for counts, step in (*dear.values(), *cheap.values()):
        assert sum(counts) == 20 and step >= 0.02


CHEAP = [cost(10), cost(10)]  # sends next to nothing: always the fastest on a slow link


def test_the_fastest_is_not_recommended_if_it_costs_accuracy_or_nobody_knows():
    slow = setup("100mbit")
    for risky, word in (
        (LOSSY, "+96.8 % (gpt2, adamw, 1 seed)"),
        ("topk(density=0.01)", "unknown"),
    ):
        options = rank(slow, COSTS | {risky: CHEAP})
        assert min(options, key=lambda option: option.step).recipe == risky
        assert choose(options).recipe == SPARSE and options[-1].recipe == risky
        said = verdict(options, slow)
        assert said.startswith(f"Use {SPARSE}: ")
        assert f"Not recommended: {risky}, about " in said and f"accuracy: {word}." in said
        alone = rank(slow, {DENSE: COSTS[DENSE], risky: CHEAP})
        assert choose(alone).recipe == DENSE and "known to keep accuracy" in verdict(alone, slow)


def test_whoever_tolerates_the_cost_may_have_it():
    options = rank(setup("100mbit", tolerance=97.0), COSTS | {LOSSY: CHEAP})
    said = verdict(options, setup(tolerance=97.0))
    assert choose(options).recipe == LOSSY
    assert "cost in accuracy: +96.8 % (gpt2, adamw, 1 seed)" in said and "Not" not in said
    unknown = rank(setup("100mbit", tolerance=1e9), COSTS | {"topk(density=0.01)": CHEAP})
    assert choose(unknown).recipe == SPARSE  # unknown is no cost that one can tolerate


def test_only_trainings_with_the_optimizer_asked_for_count():
    """What ACP-SGD cost under SGD is a tenth of what it cost under Adam; gtopk with momentum was
    recorded under SGD alone."""
    slow = {kind: setup("100mbit", optimizer=kind, tolerance=11) for kind in ("sgd", "adam", None)}
    best = {kind: choose(rank(here, COSTS | {LOSSY: CHEAP})) for kind, here in slow.items()}
    assert [best[kind].recipe for kind in ("sgd", "adam", None)] == [LOSSY, DENSE, SPARSE]
    options = rank(slow["adam"], COSTS | {LOSSY: CHEAP})
    assert {o.recipe for o in options if o.worst is None} == {SPARSE, "bf16()"}
    said = verdict(rank(slow[None], COSTS), slow[None])
    assert "Under adam nobody recorded it." in said
    assert "nobody" not in verdict(rank(slow["sgd"], COSTS), slow["sgd"])


def test_the_worst_of_several_jobs_counts():
    (option,) = [o for o in rank(setup(), COSTS | {LOSSY: CHEAP}) if o.recipe == LOSSY]
    assert {trial.job for trial in option.trials} == {"resnet20", "lstm-lm", "gpt2"}
    assert option.worst.cost == max(trial.cost for trial in option.trials)
    assert planner.price(option) == "+96.8 % (gpt2, adamw, 1 seed)"


def test_a_simpler_recipe_that_costs_accuracy_is_no_refuge(monkeypatch):
    """16 bits, about as fast as the best, but recorded as lossy."""
    costs = {DENSE: COSTS[DENSE], SPARSE: CHEAP, "bf16()": CHEAP}
    assert choose(rank(setup("100mbit"), costs)).recipe == "bf16()"
    lost = Trial(recipe="bf16()", job="x", optimizer="sgd", clipped=False, workers=4, steps=9,
                 seeds=1, saving=2.0, cost=3.0)  # fmt: skip
    known = (lost, *evidence.find(SPARSE))
    monkeypatch.setattr(evidence, "trials", lambda: known)
    assert choose(rank(setup("100mbit"), costs)).recipe == SPARSE


def test_speed_ups_have_two_digits():
    assert [planner.about(x) for x in (0.987, 1.0, 2.345, 56.43, 163.4)] == [
        "about 0.99 x", "about 1 x", "about 2.3 x", "about 56 x", "about 160 x",
    ]  # fmt: skip
    rows = table(rank(setup("100mbit"), COSTS), rank(setup("100mbit"), COSTS)[-1])
    assert all(len(row[2].replace(".", "")) <= 2 for row in rows[1:])


def test_the_table_has_a_line_and_below_it_what_is_not_recommended():
    here = setup("100mbit")
    found = tables(rank(here, COSTS | {LOSSY: CHEAP, "topk(density=0.01)": CHEAP}), here)
    (above, safe), (below, risky) = found.items()
    assert above.startswith("Within 1 % of dense") and below.startswith("Not recommended")
    assert [row[0] for row in safe[1:]] == [SPARSE, "bf16()", DENSE]
    assert {row[0]: row[3] for row in risky[1:]} == {
        LOSSY: "+96.8 % (gpt2, adamw, 1 seed)", "topk(density=0.01)": "unknown",
    }  # fmt: skip
    assert safe[0][3] == "cost in accuracy" and safe[-1][3] == "none"
    assert len(tables(rank(here, COSTS), here)) == 1


def test_the_page_says_what_it_costs_too():
    pytest.importorskip("matplotlib")
    here = setup("100mbit")
    costs = COSTS | {LOSSY: CHEAP}
    made = page("A plan", here, costs, rank(here, costs))
    assert "Not recommended: acpsgd(rank=4), about" in made.lead
    assert [section.best for section in made.sections[:2]] == [0, -1]
    assert made.sections[1].table[1][3] == "+96.8 % (gpt2, adamw, 1 seed)"


def test_every_candidate_but_the_well_known_fast_ones_was_recorded():
    for steps in (1000, 20_000):
        calls = candidates(steps)
        assert {"bf16()", "int8()", "int4()"} <= set(calls)
        assert [call for call in calls if not evidence.find(call)] == ["topk(density=0.01)"]
        worst = {call: evidence.worst(evidence.find(call, "sgd")) for call in calls}
        safe = {call.partition("(")[0] for call, w in worst.items() if w and w.cost <= 1}
        assert safe == {"bf16", "int8", "int4", "tuned", "powersgd"}


def test_a_schedule_is_priced_at_its_mean():
    """By hand: (0.3 - 0.01) / log(30) on the ramp, for three quarters of the training."""
    mean = 0.75 * 0.29 / math.log(30) + 0.25 * 0.01 + 1e-3
    frozen = freeze(recipes.parse(SPARSE), 1000)
    assert frozen.inner.density == pytest.approx(mean, rel=0.01)
    ranks = freeze(recipes.parse("powersgd(rank=Piecewise((999,), (8, 64)))"), 1000)
    assert ranks.inner.frame.rank == 8
    blocks = freeze(recipes.parse("onebit(block=Piecewise((500,), (512, 256)))"), 1000)
    assert blocks == recipes.onebit(block=384)
    plain = recipes.topk(0.01)
    assert freeze(plain, 1000) == plain


def test_a_ramp_moves_to_another_world_at_its_mean():
    """Three ranks' lists of a gathered top-k instead of one; at density 1 it would go dense."""
    call = "topk(density=Ramp(start=1.0, end=0.01, steps=10))"
    there = move(call, setup(world=4, steps=1000), [cost(100), cost(100_000)], 2)
    assert there[1].sent == pytest.approx(3 * 100_000, rel=0.01)
