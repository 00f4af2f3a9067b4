"""Small worlds for collectives: what ranks bring, and what came of it, step by step."""

from __future__ import annotations

import torch

from thinwire import Bucket
from thinwire.comm import local
from thinwire.comm.metered import Metered

N, K = 400, 20
WORLDS = [1, 2, 3, 4, 5, 6, 7, 8, 9, 16]


def private(rank, seed=0):
    return torch.randn(N, generator=torch.Generator().manual_seed(100 * seed + rank))


def disjoint(rank, seed=0):
    x = torch.zeros(N)
    x[rank::17] = private(rank, seed)[rank::17]
    return x


INPUTS = {
    "private": private,
    "same": lambda rank, seed=0: private(0, seed),
    "disjoint": disjoint,
    "one rank only": lambda rank, seed=0: private(rank, seed) * (rank == 0),
}


def reduce(recipe, world, make, steps=4):
    states = [{} for _ in range(world)]

    def worker(comm):
        found = []
        for step in range(steps):
            meter = Metered(comm, trace=True)
            bucket = Bucket.of({"w": make(comm.rank, step)}, state=states[comm.rank], step=step)
            n = bucket.layout.numel
            reduced = recipe.reduce(bucket, meter)
            found.append((reduced.mean.clone(), reduced.sent.add_into(torch.zeros(n)), meter))
        return found

    return local.run(world, worker)


def check_law(results, world, tolerance=2e-6):
    """Same bits everywhere, and the mean is the average of what was sent."""
    for step in range(len(results[0])):
        means = [rank[step][0] for rank in results]
        assert all(torch.equal(mean, means[0]) for mean in means)
        average = sum(rank[step][1].double() for rank in results) / world
        assert (means[0].double() - average).abs().max() <= tolerance


def phases(results, step=-1, rank=0):
    """What a rank did in a step, in the collective's own words."""
    return [event.phase for event in results[rank][step][2].events]
