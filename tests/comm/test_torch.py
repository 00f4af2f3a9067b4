"""The same verbs over gloo give the same answers as over threads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.comm.test_local import expected, verbs
from tests.processes import Pool
from thinwire.comm import torch as torch_comm
from thinwire.comm.torch import TorchComm


def over_gloo(rank: int, world: int) -> dict[str, Any]:
    return verbs(TorchComm(dist.group.WORLD))


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_verbs(pool: Pool, world: int) -> None:
    assert pool.run(world, over_gloo) == [expected(rank, world) for rank in range(world)]


def in_turns(rank: int, world: int) -> dict[str, Any]:
    """Every message long enough for turns, those of no bytes among them."""
    before, torch_comm.IN_TURNS = torch_comm.IN_TURNS, 1
    try:
        return verbs(TorchComm(dist.group.WORLD))
    finally:
        torch_comm.IN_TURNS = before


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_messages_in_turns_are_the_same_messages(pool: Pool, world: int) -> None:
    assert pool.run(world, in_turns) == [expected(rank, world) for rank in range(world)]


def one_large_message(rank: int, world: int) -> list[list[int]]:
    """Only rank 0 has much to send, and only to rank 1; nobody was told sizes."""
    comm, chosen = TorchComm(dist.group.WORLD), []
    in_turns = comm._all_to_all_in_turns
    comm._all_to_all_in_turns = lambda *args: chosen.append("turns") or in_turns(*args)  # type: ignore[method-assign]
    much = torch_comm.IN_TURNS // 4  # entries of four bytes
    parts = [torch.zeros(much if (rank, to) == (0, 1) else rank + to) for to in range(world)]
    sizes = [part.numel() for part in comm.all_to_all(parts)]
    comm.all_to_all([torch.zeros(2)] * world)
    gathered = [part.numel() for part in comm.all_gather(torch.zeros(much * (rank == 0) + 1))]
    return [sizes, gathered, [len(chosen)]]


@pytest.mark.slow
def test_ranks_choose_alike_when_only_one_has_a_large_message(pool: Pool) -> None:
    much = torch_comm.IN_TURNS // 4
    for rank, (sizes, gathered, turns) in enumerate(pool.run(3, one_large_message)):
        assert sizes == [much if (source, rank) == (0, 1) else source + rank for source in range(3)]
        assert gathered == [much + 1, 1, 1]
        assert turns == [2]
