"""A throttled link takes its time, and changes neither results nor what is counted."""

from __future__ import annotations

import time

import pytest
import torch

from thinwire.comm import local
from thinwire.comm.metered import Metered
from thinwire.comm.throttled import Throttled

RATE = 1e6  # bits per second


def exercise(comm, size):
    """Every verb once; what it gave."""
    beside = (comm.rank + 1) % size, (comm.rank - 1) % size
    return [
        comm.all_reduce(torch.arange(12.0) * comm.rank),
        *comm.all_gather(torch.full((5,), float(comm.rank)), [5] * size),
        *comm.all_gather(torch.full((comm.rank,), 2.0)),
        *comm.all_to_all([torch.full((r,), 1.0) for r in range(size)], [comm.rank] * size),
        comm.exchange(torch.full((9,), float(comm.rank)), *beside, 9),
        comm.broadcast(torch.full((2,), float(comm.rank)), 0),
        comm.barrier(),
    ]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_verb_waits_for_its_bytes_and_gives_the_same(size):
    def worker(comm):
        naps = []
        slow, plain = Throttled(comm, RATE, sleep=naps.append), Metered(comm)
        found, expected = exercise(slow, size), exercise(plain, size)
        pairs = zip(found, expected, strict=True)
        assert all(a is b is None or torch.equal(a, b) for a, b in pairs)
        assert slow.traffic == plain.traffic and slow.messages == plain.messages
        assert len(naps) == slow.rounds == 7
        assert sum(naps) == pytest.approx(8 * plain.bytes / RATE)
        return naps

    for rank, naps in enumerate(local.run(size, worker)):
        others = size - 1
        assert naps[0] == pytest.approx(8 * (2 * others * 48 // size) / RATE)
        assert naps[5] == pytest.approx(8 * 8 * others / RATE if rank == 0 else 0)
        assert naps[6] == 0


def test_peers_get_the_data_no_sooner_than_the_link_allows():
    crossed = []

    def cross(seconds):
        time.sleep(seconds)
        crossed.append(seconds)

    def worker(comm):
        link = Throttled(comm, 8 * 4000 / 0.01, sleep=cross if comm.rank == 0 else lambda s: None)
        link.broadcast(torch.zeros(1000), 0)
        assert crossed == pytest.approx([0.01]), "rank 1 sends nothing, and waits all the same"
        assert comm.rank or link.seconds >= 0.01, "the wait counts as time of the exchange"

    local.run(2, worker)


@pytest.mark.parametrize("rate", [0, -1.0, float("nan")])
def test_a_link_needs_a_rate(rate):
    with pytest.raises(ValueError, match="rate must be above 0 bits per second, got"):
        local.run(1, lambda comm: Throttled(comm, rate))
