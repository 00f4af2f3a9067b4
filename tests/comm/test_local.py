"""The laptop's cluster: verbs, and errors that reach the caller."""

from __future__ import annotations

import pytest
import torch

from thinwire.comm import local
from thinwire.comm.metered import Metered


def verbs(comm) -> dict[str, object]:
    """Every verb once, ragged and empty: what must come out is a function of (rank, size)."""
    rank, size = comm.rank, comm.size
    after, before = (rank + 1) % size, (rank - 1) % size
    return {
        "sum": comm.all_reduce(torch.full((3,), float(rank))).tolist(),
        "empty": comm.all_reduce(torch.zeros(0)).tolist(),
        "ragged": [t.tolist() for t in comm.all_gather(torch.full((rank,), rank))],
        "equal": [t.tolist() for t in comm.all_gather(torch.tensor([rank]), [1] * size)],
        "none": [t.tolist() for t in comm.all_gather(torch.zeros(0))],
        "all": [t.tolist() for t in comm.all_to_all([torch.full((r,), rank) for r in range(size)])],
        "known": [
            t.tolist()
            for t in comm.all_to_all([torch.tensor([rank, r]) for r in range(size)], [2] * size)
        ],
        "traded": trade(comm),
        "ring": comm.exchange(torch.full((rank + 1,), rank), after, before).tolist(),
        "sized": comm.exchange(torch.tensor([rank]), after, before, 1).tolist(),
        "one way": _list(
            comm.exchange(torch.tensor([7]), 0 if rank == size - 1 else None,
                          size - 1 if rank == 0 else None)
        ),
        "root": comm.broadcast(torch.tensor([rank]), size - 1).tolist(),
        "barrier": comm.barrier(),
    }  # fmt: skip


def trade(comm) -> dict[int, list[int]]:
    """Two bytes for every other rank, made and taken one at a time."""
    came: dict[int, list[int]] = {}

    def take(rank: int, data: torch.Tensor) -> None:
        assert rank not in came
        came[rank] = data.tolist()

    comm.trade(2, lambda to: torch.tensor([comm.rank, to], dtype=torch.uint8), take)
    return came


def _list(x):
    return None if x is None else x.tolist()


def expected(rank: int, size: int) -> dict[str, object]:
    before = (rank - 1) % size
    return {
        "sum": [sum(range(size)) * 1.0] * 3,
        "empty": [],
        "ragged": [[r] * r for r in range(size)],
        "equal": [[r] for r in range(size)],
        "none": [[] for _ in range(size)],
        "all": [[r] * rank for r in range(size)],
        "known": [[r, rank] for r in range(size)],
        "traded": {r: [r, rank] for r in range(size) if r != rank},
        "ring": [before] * (before + 1),
        "sized": [before],
        "one way": [7] if rank == 0 else None,
        "root": [size - 1],
        "barrier": None,
    }


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_verbs(size):
    results = local.run(size, lambda comm: verbs(Metered(comm)))
    assert results == [expected(rank, size) for rank in range(size)]


def test_the_first_error_ends_all_ranks_and_is_raised():
    def worker(comm):
        if comm.rank == 1:
            raise KeyError("rank one is out")
        comm.barrier()

    with pytest.raises(KeyError, match="rank one is out"):
        local.run(4, worker)


def test_ranks_that_do_not_meet_are_reported():
    with pytest.raises(TimeoutError, match="did not meet"):
        local.run(3, lambda comm: comm.rank == 0 or comm.barrier(), timeout=0.3)


def test_a_world_needs_a_rank():
    with pytest.raises(ValueError, match="at least one rank, got 0"):
        local.run(0, lambda comm: None)


def test_sizes_ranks_do_not_agree_on_are_an_error():
    """A real network would hang, or end the process."""
    for worker in (
        lambda comm: comm.all_gather(torch.zeros(2), [2, 3]),
        lambda comm: comm.all_to_all([torch.zeros(1)] * 2, [1, 2]),
        lambda comm: comm.exchange(torch.zeros(3), 1 - comm.rank, 1 - comm.rank, 4),
        lambda comm: comm.exchange(
            torch.zeros(3), 1 - comm.rank, 1 - comm.rank, 3 if comm.rank else None
        ),
    ):
        with pytest.raises(RuntimeError, match=r"expected|announces"):
            local.run(2, worker)
