"""Profiles: the order of gradients, what a recipe calls, and that all ranks get the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from thinwire import recipes
from thinwire.comm import local
from thinwire.plan import planner, profile
from thinwire.plan.profile import SAMPLES, Cost


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))


def test_gradients_come_from_the_last_layer_to_the_first():
    def worker(comm):
        return profile.measure_model(
            net(), (torch.randn(4, 64),), lambda y: y.square().mean(), comm
        )

    found = local.run(2, worker)
    assert found[0] == found[1]
    names = [name for name, _ in found[0].backward]
    assert {name.split(".")[0] for name in names[:2]} == {"2"}
    assert all(seconds >= 0 for _, seconds in found[0].backward)
    assert found[0].forward > 0 and found[0].alone > 0
    assert found[0].numel == sum(p.numel() for p in net().parameters())


def test_a_model_without_parameters_is_refused():
    with pytest.raises(ValueError, match="nothing to plan"):
        local.run(
            1, lambda comm: profile.measure_model(nn.Tanh(), (torch.ones(1),), torch.sum, comm)
        )


def model_of(sizes):
    shapes = {f"p{i}": torch.Size([size]) for i, size in enumerate(sizes)}
    times = tuple((name, 1e-3) for name in shapes)
    return profile.Model(forward=0.0, backward=times, optimizer=0.0, shapes=shapes)


def test_buckets_are_ddps():
    mb = 2**20 // 4
    groups = profile.buckets(model_of([mb // 2, mb, mb, 5 * mb, mb]), cap_mb=4, first_mb=1)
    assert groups == [["p0", "p1"], ["p2", "p3"], ["p4"]]


def test_costs_are_what_the_recipe_calls():
    model = model_of([3000, 3000, 5000])
    layouts = planner.layouts(model, [["p0"], ["p1"], ["p2"]])

    def worker(comm):
        return profile.measure_costs(recipes.topk(density=0.01), layouts, comm, steps=2)

    found = local.run(3, worker)
    assert found[0] == found[1] == found[2]
    first, second, third = found[0]
    assert first == second != third  # alike ones are measured once
    assert first.steps == 2 and [verb for verb, _ in first.calls] == ["all_gather"] * 2
    assert first.sent == recipes.topk(density=0.01).traffic(layouts[0], 3).bytes
    assert third.memory >= 4 * 5000
    dense = local.run(
        2, lambda comm: profile.measure_costs(recipes.dense(), layouts[:1], comm, steps=1)
    )
    assert dense[0][0].memory == 0


def test_of_many_kinds_some_are_measured_and_the_others_in_proportion():
    sizes = [1000 * (i + 1) for i in range(3 * SAMPLES)]
    layouts = planner.layouts(model_of(sizes), [[f"p{i}"] for i in range(len(sizes))])
    found = local.run(
        2, lambda comm: profile.measure_costs(recipes.dense(), layouts, comm, steps=1)
    )[0]
    for size, cost in zip(sizes, found, strict=True):
        assert cost.sent == pytest.approx(4 * size, rel=0.01)


def test_more_ranks_send_more_and_write_more():
    cost = Cost(select=1.0, effort=1.0, scatter=1.0, calls=(("all_gather", 30),), steps=1)
    there = cost.among(8, 4, 7 / 3)
    assert there.sent == 70 and there.select == 1.0
    assert there.effort == pytest.approx(7 / 3) and there.scatter > 1
    assert cost.among(4, 4, 1.0) is cost
    summed = replace(cost, calls=(("all_reduce", 30),)).among(8, 4, 7 / 3)
    assert summed.scatter == 1.0, "a sum is written once, from however many"


def test_a_larger_bucket_costs_more_of_everything():
    cost = Cost(select=1.0, effort=2.0, scatter=3.0, calls=(("exchange", 10),), steps=1, memory=7)
    large = cost.times(3)
    assert (large.select, large.effort, large.scatter) == (3.0, 6.0, 9.0)
    assert (large.sent, large.memory) == (30, 21)


def test_ranks_with_different_models_are_told():
    def worker(comm):
        net = nn.Linear(4, 3 + comm.rank)
        with pytest.raises(ValueError, match="ranks disagree on the model"):
            profile.measure_model(net, (torch.randn(2, 4),), torch.sum, comm)
        return True

    assert local.run(3, worker) == [True] * 3


def test_of_several_visits_the_middle_counts():
    visits = [
        profile.Cost(select=s, effort=2.0, scatter=1.0, calls=(("all_gather", 10),), steps=1)
        for s in (1.0, 9.0, 2.0)
    ]
    cost = profile.median_cost(visits)
    assert (cost.select, cost.effort, cost.scatter) == (2.0, 2.0, 1.0)
    assert cost.steps == 3 and cost.sent == 10
