"""gTop-k: any world, no gradient lost; and the published rule, which loses some."""

from __future__ import annotations

import pytest
import torch

from tests.collectives.worlds import INPUTS, WORLDS, K, N, check_law, private, reduce
from thinwire import Bucket, recipes
from thinwire.bucket import whole
from thinwire.collectives.gtopk import GTopK, largest_power, merge_largest
from thinwire.combinators import Remember
from thinwire.comm import local
from thinwire.payload import Sparse
from thinwire.reducers import Select
from thinwire.selectors.estimators import Constant
from thinwire.selectors.threshold import Threshold
from thinwire.selectors.topk import topk
from thinwire.state import State
from thinwire.wire import Wire
from thinwire.wire.link import Link


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("world", WORLDS)
def test_conservation_in_every_world(world, kind, ragged):
    select = Select(pick=topk, over=whole, density=K / N, collective=GTopK(ragged=ragged))
    results = reduce(Remember(select), world, INPUTS[kind])
    for step in range(4):
        means = [rank[step][0] for rank in results]
        assert all(torch.equal(mean, means[0]) for mean in means)
        average = sum(rank[step][1].double() for rank in results) / world
        assert (means[0].double() - average).abs().max() <= 1e-6
        assert int((means[0] != 0).sum()) <= K


@pytest.mark.parametrize("world", WORLDS)
def test_ranks_that_select_nothing(world):
    """Only odd ranks have anything above the threshold."""
    pick = Threshold(estimate=Constant(0.5), correct=None, capacity=1.0)
    select = Select(pick=pick, over=whole, density=K / N, collective=GTopK(ragged=True))
    results = reduce(Remember(select), world, lambda r, s: private(r, s) * (r % 2), steps=2)
    average = sum(rank[0][1].double() for rank in results) / world
    assert (results[0][0][0].double() - average).abs().max() <= 1e-6


@pytest.mark.parametrize("world", [w for w in WORLDS if w > 1])
def test_bytes_are_k_log_p(world):
    recipe = recipes.gtopk(density=K / N)
    results = reduce(recipe, world, private, steps=1)
    sent = [rank[0][2].traffic.bytes for rank in results]
    hops = largest_power(world).bit_length() - 1
    priced = recipe.traffic(Bucket.of({"w": private(0)}, state={}).layout, world)
    assert max(sent) == priced.bytes
    if world == largest_power(world):
        assert set(sent) == {8 * K * hops}


def test_the_result_is_the_exact_top_k_where_nothing_is_dropped_on_the_way():
    """Two ranks merge once: the k largest of the sum of the two lists."""
    results = reduce(recipes.gtopk(density=K / N, memory="none"), 2, private, steps=1)
    total = torch.zeros(N)
    for rank in range(2):
        x = private(rank)
        best = x.abs().topk(K).indices
        total[best] += x[best]
    best = total.abs().topk(K).indices
    expected = torch.zeros(N)
    expected[best] = total[best] / 2
    assert torch.allclose(results[0][0][0], expected)


def test_merging_is_symmetric_to_the_bit():
    draw = torch.Generator().manual_seed(0)
    a, b = (
        Sparse(torch.randperm(50, generator=draw)[:20].sort().values,
               torch.randn(20, generator=draw), 50)
        for _ in range(2)
    )  # fmt: skip
    ab, ba = merge_largest(a, b, 15), merge_largest(b, a, 15)
    assert torch.equal(ab.indices, ba.indices) and torch.equal(ab.values, ba.values)


@pytest.mark.parametrize("world", [4, 5, 8])
def test_a_group_rounds_at_random_alike(world):
    """Ranks that hold the same partial sum draw the same numbers for it."""
    check_law(reduce(recipes.gtopk(density=K / N, wire="natural"), world, private), world, 1e-5)


def published_share(mine: Sparse, total: Sparse) -> Sparse:
    """The published rule: whatever of mine is in the end result counts as sent."""
    there = torch.isin(mine.indices, total.indices)
    return Sparse(mine.indices[there], mine.values[there], mine.numel)


@pytest.mark.negative_control
def test_the_published_rule_loses_gradient():
    def worker(comm):
        x = private(comm.rank) + 0.5 * private(99)
        best = x.abs().topk(K).indices.sort().values
        mine = Sparse(best, x[best], N)
        layout = Bucket.of({"w": x}, state={}).layout
        link = Link(comm, Wire())
        total, share = GTopK().sum(mine, K, 0, link, State({}, None, layout, "c"))
        both = (share, published_share(mine, total))
        return [total.add_into(torch.zeros(N)), *(s.add_into(torch.zeros(N)) for s in both)]

    results = local.run(8, worker)
    total = results[0][0].double()
    ours, published = (sum(r[i].double() for r in results) for i in (1, 2))
    assert (total - ours).abs().max() <= 1e-5
    assert (total - published).abs().max() > 0.1, "a dropped share came back from elsewhere"
