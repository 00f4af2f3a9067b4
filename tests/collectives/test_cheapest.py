"""The hybrid: per tensor, whichever of dense and sparse sends less; the same sum either way."""

from __future__ import annotations

import pytest
import torch

from tests.collectives.worlds import check_law
from thinwire import Bucket, recipes
from thinwire.collectives.cheapest import Cheapest, evenly
from thinwire.collectives.gather import AllGather
from thinwire.collectives.gtopk import GTopK
from thinwire.collectives.slots import Slots
from thinwire.collectives.split import SplitReduce
from thinwire.comm import local
from thinwire.comm.metered import Metered
from thinwire.wire import Wire
from thinwire.wire.average import reduce_traffic


def run(recipe, make, world, steps=3):
    states = [{} for _ in range(world)]

    def worker(comm):
        found = []
        for step in range(steps):
            bucket = Bucket.of(make(comm.rank, step), state=states[comm.rank], step=step)
            meter = Metered(comm, trace=True)
            out = recipe.reduce(bucket, meter)
            sent = out.sent.add_into(torch.zeros(bucket.layout.numel))
            found.append((out.mean.clone(), sent, meter))
        return found

    return local.run(world, worker)


def random(rank, step):
    draw = torch.Generator().manual_seed(10 * step + rank)
    return {name: torch.randn(20, 30, generator=draw) for name in ("thin", "thick")}


def verbs(results, step):
    return [event.verb for event in results[0][step][2].events]


@pytest.mark.parametrize("by", ["price", "fill"])
@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_each_tensor_goes_its_own_way(world, by):
    """One at 2 %, one at 60 %: with two ranks or more the second is cheaper dense."""
    recipe = recipes.topk(density={"thin": 0.02, "thick": 0.6}, collective=Cheapest(by=by))
    results = run(recipe, random, world)
    check_law(results, world)
    if by == "fill":  # seen in the first step, acted on in the second
        hybrid = ["all_reduce", "all_reduce", "all_gather"] if world > 1 else ["all_gather"]
        assert verbs(results, 1) == verbs(results, 2) == hybrid
    other = run(recipes.topk(density={"thin": 0.02, "thick": 0.6}), random, world)
    for step in range(3):
        assert torch.allclose(results[0][step][0], other[0][step][0], atol=1e-6)


SIZES = {"large": (1000, 1000), "small": (500, 100)}


@pytest.mark.parametrize("name", ["topk", "adtopk"])
def test_each_tensor_is_priced_by_its_own_count(name):
    """A million entries at 0.1 % gathered, 50,000 at 60 % all-reduced: by their mean density both
    would be gathered, for 744,024 bytes."""

    def make(rank, step):
        draw = torch.Generator().manual_seed(10 * step + rank)
        return {name: torch.randn(shape, generator=draw) for name, shape in SIZES.items()}

    recipe = getattr(recipes, name)({"large": 0.001, "small": 0.6}, collective="cheapest")
    results = run(recipe, make, 4, steps=2)
    check_law(results, 4)
    counts = 8 * 3  # of the gather
    for step in range(2):
        assert verbs(results, step) == ["all_reduce", "all_gather"]
        assert [rank[step][2].bytes for rank in results] == [300_000 + 24_000 + counts] * 4
    priced = recipe.traffic(Bucket.of(make(0, 0), state={}).layout, 4)
    assert priced == results[0][0][2].traffic


def test_what_merges_the_rest_is_asked_for_the_rest():
    """Of the thin tensor 12 entries, whatever the thick one has: gTop-k then keeps that many."""
    recipe = recipes.topk(
        density={"thin": 0.02, "thick": 0.6}, collective=Cheapest(sparse=GTopK(ragged=True))
    )
    results = run(recipe, random, 8, steps=2)
    check_law(results, 8)
    for step in range(2):
        assert int((results[0][step][0][:600] != 0).sum()) == 12


def test_without_counts_all_tensors_have_one_density():
    """A choice of the whole bucket says nothing of any tensor."""
    assert evenly(60, [400, 0, 200]) == ((400, 40), (0, 0), (200, 20))
    results = run(recipes.gtopk(0.6, collective="cheapest"), random, 4, steps=1)
    check_law(results, 4)
    assert verbs(results, 0) == ["all_reduce"]


def test_it_never_sends_more_than_either():
    for world in (2, 4, 8, 16):
        for density in (0.01, 0.1, 0.3, 0.9):
            sizes = {}
            for collective in (Cheapest(), AllGather(ragged=True)):
                results = run(recipes.topk(density, collective=collective), random, world, 1)
                sizes[type(collective)] = results[0][0][2].bytes
            dense = run(recipes.dense(), random, world, 1)[0][0][2].bytes
            assert sizes[Cheapest] <= min(sizes[AllGather], dense) + 8 * (world - 1)


def test_the_break_even():
    """Pairs of 8 bytes to P - 1 ranks against 8(P-1)/P bytes a number: k = n / P."""

    def sent(k, world, **options):
        return Cheapest(**options).traffic(k, 10_000, world, Wire()).bytes

    dense = reduce_traffic(10_000, 4, Wire()).bytes
    assert sent(2490, 4) < dense == sent(2510, 4)
    assert sent(10_000, 1) == 0
    # an owner's sums cost less than a gather: dense pays later, or never
    for sparse in (SplitReduce(), Slots()):
        assert sent(2510, 4, sparse=sparse) == sparse.traffic(2510, 10_000, 4, Wire()).bytes < dense


@pytest.mark.parametrize("coded", ["int8", "bf16", "fp16"])
def test_what_is_counted_does_not_touch_what_is_summed(coded):
    """Counts of hundreds beside gradients of a thousandth, on wires with a scale a block."""

    def small(rank, step):
        return {name: 1e-3 * x for name, x in random(rank, step).items()}

    means = [
        run(recipes.topk(density=0.6, wire=coded, collective=Cheapest(by=by)), small, 4)[0][2][0]
        for by in ("price", "fill")
    ]
    assert torch.equal(*means)


def test_options_are_checked():
    with pytest.raises(ValueError, match="'price' or 'fill'"):
        Cheapest(by="weight")
    with pytest.raises(ValueError, match="ragged=True"):
        Cheapest(sparse=AllGather())
