"""Messages between pairs under NCCL's rule: grouped they pass, one by one they wait for ever."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from tests.comm.nccl_model import Group, World
from tests.comm.test_local import expected, verbs
from thinwire import recipes
from thinwire.bucket import Bucket
from thinwire.comm import local
from thinwire.comm.torch import TorchComm
from thinwire.protocols import WireError


def over_nccl(world: int, worker: Callable[[TorchComm], Any]) -> list[Any]:
    shared = World(world)
    groups = [Group(shared, rank) for rank in range(world)]
    with ThreadPoolExecutor(world) as ranks:
        found = list(ranks.map(lambda g: worker(TorchComm(g)), groups))  # type: ignore[arg-type]
    for group in groups:
        group.close()
    return found


@pytest.mark.parametrize("world", [2, 3, 4])
def test_verbs_as_over_threads(world: int) -> None:
    assert over_nccl(world, verbs) == [expected(rank, world) for rank in range(world)]


def reduced(recipe: Any) -> Callable[[Any], Any]:
    def worker(comm: Any) -> Any:
        grad = torch.randn(400, generator=torch.Generator().manual_seed(comm.rank))
        return recipe.reduce(Bucket.of({"w": grad}, state={}), comm).mean.tolist()

    return worker


@pytest.mark.parametrize("world", [3, 4, 5])
@pytest.mark.parametrize("kind", ["gtopk", "spardl", "slots"])
def test_recipes_that_swap_lists_end_with_the_same_mean(kind: str, world: int) -> None:
    recipe = getattr(recipes, kind)(density=0.1)
    assert over_nccl(world, reduced(recipe)) == local.run(world, reduced(recipe))


@pytest.mark.negative_control
def test_one_by_one_a_swap_never_ends() -> None:
    """What this transport did: a send, and after it a receive, on both sides."""

    def swap(comm: TorchComm) -> bool:
        group, got = comm.group, torch.zeros(4)
        sent = group.send([torch.ones(4)], 1 - comm.rank, 0)
        received = group.recv([got], 1 - comm.rank, 0)
        return sent.done.wait(0.3) or received.done.wait(0.1)  # type: ignore[attr-defined]

    assert over_nccl(2, swap) == [False, False]


HUGE = 1 << 60


def announcing(verb: str) -> Callable[[TorchComm], str]:
    """Rank 1 announces far more than there can be."""

    def worker(comm: TorchComm) -> str:
        comm.room = 1000
        if comm.rank and verb == "exchange":
            comm._swap(torch.tensor([HUGE]), 0, torch.zeros(1, dtype=torch.int64), 0)
        elif comm.rank:
            comm._all_to_all(torch.tensor([HUGE, HUGE]), [1, 1], [1, 1])
        else:
            x = torch.zeros(3)
            calls: dict[str, Callable[[], Any]] = {
                "exchange": lambda: comm.exchange(x, 1, 1),
                "all_gather": lambda: comm.all_gather(x),
                "all_to_all": lambda: comm.all_to_all([x, x]),
            }
            with pytest.raises(WireError) as refused:
                calls[verb]()
            return str(refused.value)
        return ""

    return worker


@pytest.mark.parametrize("verb", ["exchange", "all_gather", "all_to_all"])
def test_a_size_beyond_the_room_is_refused_before_memory_is_taken(verb: str) -> None:
    said, _ = over_nccl(2, announcing(verb))
    assert f"rank 1 announces {HUGE} entries of 4 bytes where 1000 bytes are the most" in said
