"""The model past one machine: closed cases, speed, and what must not change with what."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest

from thinwire_lab.simulate.costs import Problem
from thinwire_lab.simulate.scale import (
    METHODS,
    Cluster,
    Training,
    exchange,
    simulate,
    table,
    winners,
)

BY_NAME = {method.name: method for method in METHODS}
TRAINING = Training(buckets=(1_000_000,) * 10, forward=0.03, backward=0.06, select=1e-9)
ETHERNET = (50e-6, 8 / 10e9)


def test_one_bucket_is_backward_and_then_the_exchange():
    training = Training(buckets=(1_000_000,), forward=0.03, backward=0.06, select=1e-9)
    ring = BY_NAME["dense (ring)"]
    alone = ring.seconds(Problem(d=1_000_000, k=10_000, world=8), ETHERNET[0], 4 * ETHERNET[1])
    step = simulate(ring, training, Cluster(world=8, between=ETHERNET))
    assert step == pytest.approx(0.09 + alone)
    sparse = BY_NAME["gTop-k (tree)"]
    alone = sparse.seconds(Problem(d=1_000_000, k=10_000, world=8), ETHERNET[0], 4 * ETHERNET[1])
    step = simulate(sparse, training, Cluster(world=8, between=ETHERNET))
    assert step == pytest.approx(0.09 + 1e-3 + alone)  # selection comes first


def test_exchanges_hide_behind_backward():
    fast = Cluster(world=8, between=(1e-6, 8 / 1e12))
    last = simulate(BY_NAME["dense (ring)"], TRAINING, fast)
    assert 0.09 < last < 0.092  # all but the last bucket's
    assert simulate(BY_NAME["dense (ring)"], TRAINING, Cluster(world=1, between=ETHERNET)) == (
        pytest.approx(0.09)
    )


def test_a_straggler_holds_everybody_up_and_a_slow_link_too():
    cluster = Cluster(world=64, between=ETHERNET)
    for method in METHODS:
        even = simulate(method, TRAINING, cluster)
        assert simulate(method, TRAINING, replace(cluster, jitter=0.2)) > even
        assert simulate(method, TRAINING, replace(cluster, slow=(0.1, 4.0))) > even
    assert simulate(METHODS[0], TRAINING, replace(cluster, jitter=0.2)) == (
        simulate(METHODS[0], TRAINING, replace(cluster, jitter=0.2))
    )


def test_the_slowest_rank_and_the_slowest_link_set_the_pace():
    """Not the mean ones: one bucket, and the draws of the simulation itself."""
    ring, one = BY_NAME["dense (ring)"], replace(TRAINING, buckets=(1_000_000,))
    cluster = Cluster(world=16, between=ETHERNET, jitter=0.2)
    slowest = 1 + 0.2 * np.abs(np.random.default_rng(0).standard_normal(16)).max()
    sending = exchange(ring, 1_000_000, one, cluster)
    assert simulate(ring, one, cluster) == pytest.approx(0.09 * slowest + sending)
    slow = replace(cluster, jitter=0.0, slow=(0.25, 4.0))
    sending = exchange(ring, 1_000_000, one, slow, slowest=4.0)
    assert simulate(ring, one, slow) == pytest.approx(0.09 + sending)
    assert sending > 3 * exchange(ring, 1_000_000, one, slow)


def test_nodes_send_less_between_them():
    flat = Cluster(world=64, between=ETHERNET)
    nodes = replace(flat, per_node=8, inside=(1e-6, 1e-12))
    dense, gather = BY_NAME["dense (ring)"], BY_NAME["Top-k (all-gather)"]
    assert exchange(dense, 10**6, TRAINING, nodes) < exchange(dense, 10**6, TRAINING, flat) / 4
    assert simulate(dense, TRAINING, nodes) < simulate(dense, TRAINING, flat)
    assert simulate(gather, TRAINING, nodes) < simulate(gather, TRAINING, flat)


def test_inside_a_node_the_sum_goes_round_before_and_after():
    """On one node that is all; on two, each rank has its part to exchange with the other node."""
    ring, n = BY_NAME["dense (ring)"], 10**6
    one = Cluster(world=8, between=ETHERNET, per_node=8, inside=(1e-5, 1e-9))
    around = 2 * (7 * 1e-5 + 7 / 8 * n * 4 * 1e-9)
    assert exchange(ring, n, TRAINING, one) == pytest.approx(around)
    part = ring.seconds(Problem(d=n // 8, k=1250, world=2), ETHERNET[0], 4 * ETHERNET[1])
    assert exchange(ring, n, TRAINING, replace(one, world=16)) == pytest.approx(around + part)


def test_65536_ranks_take_seconds():
    begin = time.process_time()
    worlds = [2**power for power in range(1, 17)]
    found = table(TRAINING, Cluster(world=2, between=ETHERNET, jitter=0.1), worlds)
    assert set(found) == set(BY_NAME) and all(len(row) == 16 for row in found.values())
    assert time.process_time() - begin < 10


def test_who_wins_depends_on_the_network():
    worlds, rates = [4, 1024], [1e8, 1e13]
    cluster = Cluster(world=4, between=(1e-6, 1e-9))
    slow, fast = winners(TRAINING, cluster, worlds, rates)
    assert not any(name.startswith(("dense", "16")) for name in slow)
    assert all(name.startswith(("dense", "16")) for name in fast)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Cluster(world=6, per_node=4, between=ETHERNET), "multiple"),
        (lambda: Cluster(world=4, between=(1e-6, 0.0)), "above 0"),
        (lambda: Training(buckets=(), forward=1, backward=1), "buckets"),
        (lambda: Training(buckets=(5,), forward=1, backward=1, density=0), "density"),
    ],
)
def test_bad_numbers_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()
