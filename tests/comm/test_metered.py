"""Bytes are what a rank sends under the textbook algorithms."""

from __future__ import annotations

import pytest
import torch

from thinwire.comm import local
from thinwire.comm.metered import Metered


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_bytes(size):
    def worker(comm):
        meter, counts = Metered(comm), []
        for call in (
            lambda: meter.all_reduce(torch.zeros(12)),
            lambda: meter.all_gather(torch.zeros(5), [5] * size),
            lambda: meter.all_gather(torch.zeros(5)),
            lambda: meter.all_to_all([torch.zeros(r) for r in range(size)], [comm.rank] * size),
            lambda: meter.trade(
                7, lambda to: torch.zeros(7, dtype=torch.uint8), lambda source, data: None
            ),
            lambda: meter.exchange(
                torch.zeros(9), (comm.rank + 1) % size, (comm.rank - 1) % size, 9
            ),
            lambda: meter.broadcast(torch.zeros(2), 0),
            meter.barrier,
        ):
            before = meter.bytes
            call()
            counts.append(meter.bytes - before)
        assert meter.rounds == 8
        return counts

    for rank, counts in enumerate(local.run(size, worker)):
        others = size - 1
        assert counts == [
            2 * others * 48 // size,
            others * 20,
            others * 28,
            4 * (sum(range(size)) - rank),
            7 * others,
            36 if size > 1 else 0,
            8 * others if rank == 0 else 0,
            0,
        ]
