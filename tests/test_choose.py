"""Choose: choices are tried, timed, agreed on and kept, and nothing is lost on the way."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import pytest
import torch

from thinwire import evidence, recipes
from thinwire.bucket import Bucket
from thinwire.choose import SETTLING, Choose, Fastest, Trials, forget
from thinwire.combinators import Remember, dense
from thinwire.comm import local
from thinwire.layout import Layout
from thinwire.protocols import Reduced, Reducer, Traffic
from thinwire.recipes.auto import recorded
from thinwire.reducers import Select
from thinwire.selectors.topk import topk

SHAPES = {"a.weight": (40, 25), "a.bias": (40,), "b.weight": (10, 40)}
TRIES = SETTLING + 2
TURN = 2 * TRIES + 1  # home has every other step, and one in the middle


@dataclass(frozen=True)
class Slow:
    """A reducer that takes its time."""

    inner: Reducer
    seconds: float

    def reduce(self, bucket, comm) -> Reduced:
        time.sleep(self.seconds)
        return self.inner.reduce(bucket, comm)

    def traffic(self, layout: Layout, world: int, step: int = 0) -> Traffic:
        return self.inner.traffic(layout, world, step)


def sparse():
    return Select(pick=topk, density=0.1)


def planned(slow):
    """Dense and topk, one of them slowed down."""
    inner = [dense(), sparse()]
    inner[slow] = Slow(inner[slow], 0.02)
    choices = (("dense", inner[0]), ("sparse", inner[1]))
    return Choose(choices=choices, decide=Fastest(), tries=TRIES)


def run(recipe, world, steps, start=0, states=None, seed=0):
    """Means, shares and states of every rank."""

    def worker(comm):
        state = states[comm.rank] if states else {}
        draw = torch.Generator().manual_seed(100 * seed + comm.rank)
        out = []
        for step in range(start, start + steps):
            grads = {name: torch.randn(shape, generator=draw) for name, shape in SHAPES.items()}
            bucket = Bucket.of(grads, state=state, step=step)
            reduced = recipe.reduce(bucket, comm)
            sent = reduced.sent.add_into(torch.zeros(bucket.layout.numel))
            out.append(
                (reduced.mean.clone(), sent, torch.cat([g.reshape(-1) for g in grads.values()]))
            )
        return out, state

    return local.run(world, worker)


def choices(state):
    return {
        name: part.get("choice")
        for name, parts in state["slots"].items()
        for path, part in parts.items()
        if path.split("/")[-1] == "plan"
    }


@pytest.mark.parametrize("slow", [0, 1])
def test_the_faster_one_is_taken_by_everybody(slow):
    results = run(Remember(planned(slow)), world=3, steps=TURN + 1)
    for _, state in results:
        assert set(choices(state).values()) == {1 - slow}
        assert set(choices(state)) == set(SHAPES)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_nothing_is_lost_while_choosing(world):
    steps = TURN + 4
    results = run(Remember(planned(0)), world=world, steps=steps)
    for step in range(steps):
        means = [rank[0][step][0] for rank in results]
        sent = [rank[0][step][1] for rank in results]
        assert all(torch.equal(mean, means[0]) for mean in means)
        assert torch.allclose(means[0], sum(sent) / world, atol=1e-5)
    for out, state in results:
        held = torch.cat(
            [parts["memory"]["residual"].reshape(-1) for parts in state["slots"].values()]
        )
        given = sum(grad for _, _, grad in out)
        assert torch.allclose(given, held + sum(sent for _, sent, _ in out), atol=1e-4)


def test_nothing_waits_for_long_while_choosing():
    """Gradients of one: no step sends more than two, however many recipes are tried."""
    among = ("topk", "adtopk", "slots", "bf16", "dense")  # low rank sends more here, or less
    recipe = recipes.auto(density=0.01, among=among)
    state, means = {}, []

    def work(comm):
        for step in range(recipe.inner.longest + 1):
            bucket = Bucket.of({"w": torch.ones(40, 25)}, state=state, step=step)
            means.append(recipe.reduce(bucket, comm).mean)

    local.run(1, work)
    assert torch.stack(means).max() == 2
    assert len(means) == 2 * 4 * 13 + 1


def test_whose_turn_it_is_and_which_steps_count():
    recipe = planned(0)
    assert recipe._turns([1]) == [1, 0, 1, 0, 0, 1, 0, 1, 0] * 2
    home, away = recipe._list_steps(10, [])
    assert home == [11, 13, 14, 16, 18] and away == [15, 17]
    home, away = recipe._list_steps(10, [1])
    assert away == [15, 17, 24, 26]
    home, away = replace(recipe, tries=6)._list_steps(0, [])
    assert away == [4, 7, 9, 11]  # even steps and odd ones: recipes that alternate show both ways


def test_those_near_the_fastest_are_tried_again_and_others_are_not():
    three = (("dense", dense()), ("slow", Slow(sparse(), 0.05)), ("sparse", sparse()))
    recipe = Choose(choices=three, decide=Fastest(), tries=TRIES, finals=9.0)
    states = [{} for _ in range(2)]
    run(Remember(recipe), world=2, steps=2 * TURN + 1, states=states)
    assert set(choices(states[0]).values()) == {None}
    (marks,) = {parts["plan"]["finals"] for parts in states[0]["slots"].values()}
    assert marks == 0b100
    run(Remember(recipe), world=2, steps=TURN, start=2 * TURN + 1, states=states)
    assert set(choices(states[0]).values()) <= {0, 2}
    assert choices(states[0]) == choices(states[1])
    trials = next(iter(recipe._trials.values()))
    assert max(trials.begun) == 3 * TURN and recipe.longest == 4 * TURN


def test_a_choice_is_kept_and_can_be_forgotten():
    recipe = Remember(planned(0))
    states = [state for _, state in run(recipe, world=2, steps=TURN + 1)]
    assert set(choices(states[0]).values()) == {1}
    again = planned(1)  # now topk is slow, but the choice was made
    run(Remember(again), world=2, steps=3, start=TURN + 1, states=states)
    assert set(choices(states[0]).values()) == {1}
    for state in states:
        assert forget(state["slots"]) == len(SHAPES)
    run(Remember(again), world=2, steps=TURN + 1, start=50, states=states)
    assert set(choices(states[0]).values()) == {0}


def test_a_run_that_broke_off_in_the_middle_takes_what_it_knows():
    recipe = Remember(planned(0))
    states = [state for _, state in run(recipe, world=2, steps=TURN - 1)]
    fresh = [dict(state) for state in states]  # what a checkpoint keeps, in a new process
    run(Remember(planned(0)), world=2, steps=2, start=TURN - 1, states=fresh)
    assert set(choices(fresh[0]).values()) == {0}  # only dense was timed: it is home


def test_times_of_an_earlier_run_do_not_count():
    """The same recipe again, from step 0, with what it has seen before still in its memory."""
    recipe = planned(0)
    states = [{} for _ in range(2)]
    run(Remember(recipe), world=2, steps=TURN + 1, states=states)
    assert all(min(trials.begun) == 0 for trials in recipe._trials.values())
    before = {key: dict(trials.begun) for key, trials in recipe._trials.items()}
    for state in states:
        state.clear()  # the same dictionary, as a new one at the old address would be
    run(Remember(recipe), world=2, steps=TRIES, states=states)
    for key, trials in recipe._trials.items():
        assert max(trials.begun) == TRIES - 1 and trials.begun[1] > before[key][1]


def test_home_is_left_only_for_something_clearly_faster():
    decide = Fastest(margin=0.03)
    counted = [range(10, 13), range(3)]

    def with_steps(first, second):
        trials = Trials()
        for start, length in ((0, first), (10, second)):
            trials.begun |= {start + i: start + i * length for i in range(4)}
        return local.run(2, lambda comm: decide(trials, counted, comm)(None)[0])

    assert with_steps(0.99, 1.0) == [0, 0]
    assert with_steps(0.9, 1.0) == [1, 1]
    assert with_steps(1.1, 1.0) == [0, 0]


def test_ranks_that_measure_differently_decide_alike():
    def worker(comm):
        trials = Trials()
        trials.begun = {i: i * (1.0 + comm.rank) for i in range(4)}
        trials.begun |= {10 + i: 10 + i * 1.4 for i in range(4)}
        return Fastest()(trials, [range(10, 13), range(3)], comm)(None)[0]

    assert local.run(2, worker) == [0, 0]  # 1.5 on average beside 1.4


def test_auto_has_dense_to_fall_back_to():
    recipe = recipes.auto(density=0.05, among=("topk", "dense"))
    assert isinstance(recipe, Remember) and isinstance(recipe.inner, Choose)
    assert [name for name, _ in recipe.inner.choices] == ["dense", "topk"]
    assert "dense" in recorded(0.0)
    for among in (("topk",), ("dense", "demo_dct"), ("dense", "dense")):
        with pytest.raises(ValueError, match="dense and some of"):
            recipes.auto(among=among)
    with pytest.raises(ValueError, match="at least two"):
        recipes.auto(among=("dense",))
    with pytest.raises(ValueError, match="tries"):
        recipes.auto(tries=2)


def names(recipe):
    return [name for name, _ in recipe.inner.choices]


def test_auto_tries_what_recorded_trainings_allow():
    """By its own means it never risks accuracy; who names recipes, or tolerates more, may."""
    for default in (recipes.auto(), recipes.auto(density=0.05, rank=2)):
        assert names(default) == ["dense", "bf16", "half", "int8", "int4"]
    for name in names(recipes.auto())[1:]:
        costs = [trial.cost for trial in evidence.find(f"{name}()")]
        assert costs and max(costs) <= 1
    assert names(recipes.auto(tolerance=26)) == [
        "dense",
        "powersgd",
        "bf16",
        "half",
        "int8",
        "int4",
    ]
    assert "powersgd" not in names(recipes.auto(tolerance=26, rank=5))  # nobody recorded that
    assert names(recipes.auto(tolerance=0)) == ["dense", "bf16", "int8"]
    assert names(recipes.auto(among=("acpsgd", "dense"))) == ["dense", "acpsgd"]
    with pytest.raises(ValueError, match="0 or more, got -1"):
        recipes.auto(tolerance=-1)
    with pytest.raises(ValueError, match="give one of them"):
        recipes.auto(tolerance=3, among=("acpsgd", "dense"))
