"""Partial sparsification: what goes dense, at whose expense, and that all ranks agree."""

from __future__ import annotations

import pytest
import torch

from thinwire import recipes
from thinwire.bucket import Bucket, kept
from thinwire.choose import Trials, Turn
from thinwire.comm import local
from thinwire.layout import Layout
from thinwire.partial import DENSE, SPARSE, Measured, Partial, find_end

RANGES = [range(2, 4), range(6, 8)]


def layout(*sizes, first=0):
    shapes = {f"p{first + i}": torch.empty(size, device="meta") for i, size in enumerate(sizes)}
    return Layout.of(shapes)


def trials(layouts, select, sparse, dense, gap=1.0):
    """Selecting a gradient, and sending it either way, take so long; so does beginning to."""
    seen = Trials()
    for choice, steps in enumerate(RANGES):
        for step in steps:
            seen.turns[step] = [
                Turn(
                    layout=one,
                    gap=gap,
                    select=0.0 if choice == DENSE else select * one.numel,
                    exchange=(dense, sparse)[choice][0] + (dense, sparse)[choice][1] * one.numel,
                    scatter=0.0,
                )
                for one in layouts
            ]
    return seen


def decided(seen, density=0.1, world=2, always=lambda slot: False):
    decide = Partial(density=density, always=always)
    slots = [slot for turn in seen.turns[7] for slot in turn.layout.slots]

    def worker(comm):
        assigned = decide(seen, RANGES, comm)
        return {slot.name: assigned(slot) for slot in slots}

    found = local.run(world, worker)
    assert all(one == found[0] for one in found)
    return found[0]


LAYOUTS = [layout(1000, 10, 20), layout(4000, 40, first=3)]


def test_small_ones_go_dense_where_selecting_is_dear_and_the_others_pay():
    seen = trials(LAYOUTS, select=1.0, sparse=(0, 0.1), dense=(0, 0.2))
    found = decided(seen)
    choices = {name: choice for name, (choice, _) in found.items()}
    assert choices == {"p0": SPARSE, "p1": DENSE, "p2": DENSE, "p3": SPARSE, "p4": DENSE}
    slots = [slot for one in LAYOUTS for slot in one.slots]
    budget = sum(kept(slot, 0.1, 0) for slot in slots)
    spent = sum(
        slot.numel if choices[slot.name] == DENSE else slot.numel * 0.1 * found[slot.name][1]
        for slot in slots
    )
    assert spent == pytest.approx(budget, rel=0.01)
    assert found["p0"][1] == found["p3"][1] < 1


def test_nothing_goes_dense_where_the_wire_is_dear():
    seen = trials(LAYOUTS, select=0.001, sparse=(0, 0.01), dense=(0, 5.0))
    assert set(decided(seen).values()) == {(SPARSE, 1.0)}


def test_the_budget_is_a_limit():
    """Everything would like to be dense, but most entries must stay within a tenth."""
    seen = trials(LAYOUTS, select=100.0, sparse=(0, 10.0), dense=(0, 0.001))
    found = decided(seen)
    assert found["p3"][0] == found["p0"][0] == SPARSE
    assert all(thinner >= 0.25 for _, thinner in found.values())


@pytest.mark.parametrize(("size", "choice"), [(750, DENSE), (751, SPARSE)])
def test_the_others_keep_a_quarter_of_their_budget_and_no_less(size, choice):
    """Of 800 and a fifth of `size`, `size` is spent; at 750 there are just 200 left of 800."""
    both = [layout(4000), layout(size, first=1)]
    found = decided(trials(both, select=100.0, sparse=(0, 10.0), dense=(0, 0.001)), density=0.2)
    assert found["p1"][0] == choice
    assert found["p0"] == (SPARSE, 0.25 if choice == DENSE else 1.0)


def test_what_gains_nothing_is_not_sent_dense():
    seen = trials(LAYOUTS, select=0.0, sparse=(0, 0.5), dense=(0, 0.5))
    assert set(decided(seen).values()) == {(SPARSE, 1.0)}


def test_what_is_dense_anyway_costs_no_budget():
    seen = trials(LAYOUTS, select=1.0, sparse=(0, 0.1), dense=(0, 0.2))
    found = decided(seen, always=lambda slot: slot.numel < 100)
    assert set(found.values()) == {(SPARSE, 1.0)}


def test_without_measurements_everything_is_sparse():
    seen = trials(LAYOUTS, select=1.0, sparse=(0, 0.1), dense=(0, 0.2))
    for step in RANGES[0]:
        del seen.turns[step]
    assert set(decided(seen).values()) == {(SPARSE, 1.0)}


def test_the_model_by_hand():
    one = layout(100, 10)
    buckets = [Measured(gap=1, select=2, sparse=3, dense=8, slots=one.slots)] * 2
    assert find_end(0, buckets) == pytest.approx(3 + 3 + 3)  # both wait for the network
    # a tenth of 110 goes dense: selection and the sparse exchange shrink, a dense one comes
    share = 10 / 110
    send = 3 * (1 - share) + 8 * share
    ready = 1 + 2 * (1 - share)
    assert find_end(10, buckets) == pytest.approx(ready + max(ready, send) + send)
    assert find_end(100, buckets) == pytest.approx(1 + 8 + 8)


def test_a_training_with_it_keeps_the_law_and_its_choice():
    recipe = recipes.adtopk(density=0.1, partial=True, collective="cheapest")
    shapes = {"w": (60, 40), "small.w": (4, 5), "bias": (60,)}

    def worker(comm):
        state = {}
        draw = torch.Generator().manual_seed(comm.rank)
        out = []
        for step in range(15):
            grads = {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}
            reduced = recipe.reduce(Bucket.of(grads, state=state, step=step), comm)
            n = reduced.mean.numel()
            out.append((reduced.mean.clone(), reduced.sent.add_into(torch.zeros(n))))
        return out, {n: parts["plan"]["choice"] for n, parts in state["slots"].items()}

    results = local.run(3, worker)
    assert all(choices == results[0][1] for _, choices in results)
    assert set(results[0][1]) == set(shapes)
    for step in range(15):
        means = [out[step][0] for out, _ in results]
        assert all(torch.equal(one, means[0]) for one in means)
        assert torch.allclose(means[0], sum(out[step][1] for out, _ in results) / 3, atol=1e-5)
