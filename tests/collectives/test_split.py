"""TopkDSA: any world, nothing lost, dense exactly where that is cheaper."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from tests.collectives.worlds import INPUTS, WORLDS, N, private, reduce
from thinwire import recipes
from thinwire.collectives import split
from thinwire.layout import regions
from thinwire.payload import Sparse
from thinwire.wire import Wire
from thinwire.wire.values import Bf16

CASES = [(kind, "fp32") for kind in INPUTS] + [("private", "bf16"), ("private", "int8")]


@pytest.mark.parametrize(("kind", "wire"), CASES)
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("density", [0.05, 0.6])
def test_conservation_in_every_world(density, world, kind, wire, monkeypatch):
    went_dense = []
    decide = split.dense_is_cheaper
    monkeypatch.setattr(
        split, "dense_is_cheaper", lambda *a: went_dense.append(decide(*a)) or went_dense[-1]
    )
    recipe = recipes.topkdsa(density=density, wire=wire)
    results = reduce(recipe, world, INPUTS[kind], steps=3)
    for step in range(3):
        means = [rank[step][0] for rank in results]
        assert all(torch.equal(mean, means[0]) for mean in means)
        average = sum(rank[step][1].double() for rank in results) / world
        assert (means[0].double() - average).abs().max() <= 2e-6
    if kind == "same":  # supports alike: the sums hold as many entries as each rank sent
        assert any(went_dense) == (density == 0.6)


@pytest.mark.parametrize("world", [2, 3, 8])
def test_the_sum_is_exact(world):
    """Without memory and with exact values: the sum of everyone's top-k, nothing dropped."""
    results = reduce(recipes.topkdsa(density=0.05, memory="none"), world, private, steps=1)
    total = torch.zeros(N)
    for rank in range(world):
        x = private(rank)
        best = x.abs().topk(20).indices
        total[best] += x[best]
    assert torch.allclose(results[0][0][0], total / world, atol=1e-6)


def test_regions_cover_everything_once():
    for n in (0, 1, 5, 100, 101):
        for world in (1, 2, 3, 7):
            spans = regions(n, world)
            assert spans[0][0] == 0 and spans[-1][1] == n and len(spans) == world
            assert all(a[1] == b[0] and a[0] <= a[1] for a, b in pairwise(spans))
    mine = Sparse(torch.tensor([0, 3, 7]), torch.tensor([2.0, 3.0, 1.0]), 10)
    parts = split.split(mine, [(0, 3), (3, 6), (6, 10)])
    assert [part.indices.tolist() for part in parts] == [[0], [3], [7]]
    assert [part.values.tolist() for part in parts] == [[2.0], [3.0], [1.0]]


def test_dense_is_cheaper_from_half_full_on():
    """Pairs of 8 bytes against values of 4; with two-byte values from a third on."""
    assert not split.dense_is_cheaper([50], [(0, 100)], Wire(), 4)
    assert split.dense_is_cheaper([51], [(0, 100)], Wire(), 4)
    assert split.dense_is_cheaper([34], [(0, 100)], Wire(values=Bf16()), 4)
