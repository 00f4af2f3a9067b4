"""Pairwise: the same verbs out of messages between pairs, in the whole world or a part of it."""

from __future__ import annotations

import pytest
import torch

from tests.comm.test_local import trade
from thinwire.comm import local
from thinwire.comm.metered import Metered
from thinwire.comm.pairwise import Pairwise


def everything(comm):
    """Every verb once, with sizes that differ from rank to rank, some of them empty."""
    mine = torch.arange(comm.rank, dtype=torch.float32) + comm.rank
    sizes = list(range(comm.size))
    parts = [torch.full((r,), float(comm.rank)) for r in range(comm.size)]
    total = torch.arange(10, dtype=torch.float64) * (comm.rank + 1)
    return [
        comm.all_gather(mine, sizes),
        comm.all_gather(mine),
        comm.all_to_all(parts),
        comm.all_to_all(parts, [comm.rank] * comm.size),
        list(map(torch.tensor, trade(comm).values())),
        [comm.all_reduce(total)],
        [comm.broadcast(torch.full((2, 3), float(comm.rank)), comm.size - 1)],
        comm.barrier(),
    ]


def same(a, b):
    return all(
        (x is None and y is None)
        or all(torch.equal(i.reshape(-1), j.reshape(-1)) for i, j in zip(x, y, strict=True))
        for x, y in zip(a, b, strict=True)
    )  # fmt: skip


@pytest.mark.parametrize("world", [1, 2, 3, 4, 7])
def test_it_does_what_the_verbs_do(world):
    plain = local.run(world, everything)
    pairs = local.run(world, lambda comm: everything(Pairwise(comm)))
    assert all(same(a, b) for a, b in zip(plain, pairs, strict=True))


def test_groups_do_not_hear_of_each_other():
    groups = [[0, 3, 4], [2, 1]]

    def worker(comm):
        ranks = next(group for group in groups if comm.rank in group)
        inner = Pairwise(comm, ranks)
        assert inner.rank == ranks.index(comm.rank) and inner.size == len(ranks)
        return inner.all_reduce(torch.tensor([float(comm.rank)])).item()

    assert local.run(5, worker) == [7.0, 3.0, 3.0, 7.0, 7.0]


def test_destinations_rotate():
    """At every turn each rank is sent to by exactly one other."""

    def worker(comm):
        meter = Metered(comm, trace=True)
        Pairwise(meter).all_to_all([torch.ones(1)] * comm.size, [1] * comm.size)
        return [event.sent[0][0] for event in meter.events]

    for turn in zip(*local.run(5, worker), strict=True):
        assert sorted(turn) == [0, 1, 2, 3, 4]
