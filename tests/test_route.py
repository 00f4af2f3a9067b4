"""Two reducers for one bucket: what each sees, and what comes out as one."""

from __future__ import annotations

import pytest
import torch

from thinwire import Bucket, recipes
from thinwire.comm import local
from thinwire.route import Route


def is_w(slot):
    return slot.name == "w"


@pytest.mark.parametrize("large", ["w", "b"])
def test_no_entry_of_the_mean_exceeds_the_peak_of_both(large):
    """The engine looks for overflow no further than the peak says."""
    route = Route(is_w, recipes.topk(density=0.1), recipes.topk(density=0.2))

    def worker(comm):
        draw = torch.Generator().manual_seed(comm.rank)
        grads = {name: torch.randn(50, generator=draw) for name in ("w", "b")}
        grads[large] *= 1e20
        return route.reduce(Bucket.of(grads, state={}), comm)

    for reduced in local.run(2, worker):
        assert 1e20 <= float(reduced.mean.abs().max()) <= reduced.peak < 1e22


def test_what_is_sent_is_that_of_both():
    route = Route(is_w, recipes.topk(density=0.1), recipes.topk(density=0.2))
    bucket = Bucket.of({"w": torch.ones(50), "b": torch.ones(50)}, state={})
    (reduced,) = local.run(1, lambda comm: route.reduce(bucket, comm))
    assert reduced.entries == reduced.sent.entries == 5 + 10
    here, there = (recipes.topk(density=d).traffic(layout, 4).bytes for d, layout in (
        (0.1, Bucket.of({"w": torch.ones(50)}, state={}).layout),
        (0.2, Bucket.of({"b": torch.ones(50)}, state={}).layout),
    ))  # fmt: skip
    assert route.traffic(bucket.layout, 4).bytes == here + there
