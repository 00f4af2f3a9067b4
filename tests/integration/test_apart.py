"""Ranks that do not do the same: an error that names both sides, never a silent divergence."""

from __future__ import annotations

import gc
import itertools
import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import thinwire
from tests.integration.common import WIDTH, batch, ddp, mlp, sgd, train, weights
from tests.processes import Pool, once
from thinwire import RankFailed, RankMismatch, recipes
from thinwire.collectives.gather import AllGather

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


class _Breaks(nn.Module):
    """Backward raises here in one step, on some ranks: buckets of later layers are sent by then."""

    def __init__(self) -> None:
        super().__init__()
        self.now = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def check(grad: torch.Tensor) -> None:
            if self.now:
                raise ArithmeticError("a bad batch")

        y = x * 1.0
        if y.requires_grad:
            y.register_hook(check)
        return y


def breaks_off(rank: int, world: int, widths: list[int], who: list[int], when: int) -> Any:
    """Skips the batch whose backward raises, as a loop with `except ...: continue` does."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(WIDTH, widths[0])]
    breaking = _Breaks()
    for place, (a, b) in enumerate(itertools.pairwise(widths)):
        layers += ([breaking] if place == when else []) + [nn.Linear(a, b)]
    net = nn.Sequential(*layers)
    optimizer = sgd(net)
    sync = thinwire.distribute(
        optimizer, net.named_parameters(), recipes.dense(), timeout=20.0, bucket_mb=0.004
    )
    try:
        for step in range(9):
            breaking.now = step == 3 and rank in who
            try:
                net(batch(rank, step)).pow(2).mean().backward()
            except ArithmeticError:
                optimizer.zero_grad()
                continue
            optimizer.step()
            optimizer.zero_grad()
    except (RankFailed, RankMismatch) as error:
        return str(error)
    steps = sync.metrics()["steps"]
    sync.detach()
    return steps, weights(net)


@pytest.mark.parametrize("widths", [[32] * 5, [32, 48, 64, 16, 8]], ids=["equal", "unequal"])
def test_a_batch_that_one_rank_breaks_off_is_an_error_with_both_sides(widths: list[int]) -> None:
    for said in once(3, breaks_off, widths, [1], 1):
        assert isinstance(said, str), "weights would have parted"
        assert "rank 1 has come to its next batch, because backward broke off in step 3" in said
        assert " is in bucket " in said
        assert "of step 3" in said


def test_a_batch_that_all_ranks_break_off_is_skipped_by_all(pool: Pool) -> None:
    found = pool.run(3, breaks_off, [32] * 5, [0, 1, 2], 1)
    assert [steps for steps, _ in found] == [8, 8, 8]
    assert all(torch.equal(w, found[0][1]) for _, w in found)


def uneven_groups(rank: int, world: int) -> bool:
    """Ranks 0 and 1 are in a group of their own that the others do not count."""
    dist.new_group([0, 1], use_local_synchronization=True) if rank < 2 else None
    net = mlp(2)
    model, optimizer = ddp(net), sgd(net)
    sync = thinwire.attach(model, recipes.topk(), timeout=60.0)
    train(model, optimizer, rank, 2)
    sync.detach()
    other = mlp(2)
    sync = thinwire.distribute(sgd(other), other.named_parameters(), recipes.topk(), timeout=60.0)
    sync.detach()
    return True


def test_ranks_may_belong_to_different_numbers_of_groups(pool: Pool) -> None:
    assert pool.run(4, uneven_groups) == [True] * 4


def cycles(rank: int, world: int, many: int, mode: str) -> list[int]:
    net = mlp(2)
    model, optimizer = net if mode == "distribute" else ddp(net), sgd(net)

    def held() -> int:
        return len(os.listdir("/proc/self/fd")) + len(os.listdir("/proc/self/task"))

    def once_around() -> None:
        if mode == "distribute":
            sync = thinwire.distribute(optimizer, net.named_parameters(), recipes.topk())
        elif mode == "refused":
            with pytest.raises(RankMismatch):
                thinwire.attach(model, recipes.topk(density=0.1 + 0.1 * rank))
            gc.collect()
            return
        else:
            sync = thinwire.attach(model, recipes.topk())
        train(model, optimizer, rank, 1)
        sync.detach()

    for _ in range(3):  # what PyTorch itself makes on first use
        once_around()
    before = held()
    for _ in range(many):
        once_around()
    deadline = time.monotonic() + 5.0
    while held() > before and time.monotonic() < deadline:  # threads of the last may still end
        time.sleep(0.05)
    return [before, held()]


@pytest.mark.parametrize("mode", ["attach", "distribute", "refused"])
def test_attaching_and_detaching_leaves_nothing_behind(pool: Pool, mode: str) -> None:
    """A thousand cycles: THINWIRE_FULL=1."""
    many = 1000 if os.environ.get("THINWIRE_FULL") else 20
    for before, after in pool.run(2, cycles, many, mode, timeout=500.0):
        assert after <= before


def announces_too_much(rank: int, world: int) -> str:
    """In its third step rank 1 tells the others of far more entries than its bucket has."""
    net = mlp(2)
    model, optimizer = ddp(net), sgd(net)
    sync = thinwire.attach(model, recipes.topk(collective=AllGather(ragged=True)), timeout=30.0)
    comm = sync._intake.peers.comm
    train(model, optimizer, rank, 2)
    if rank == 1:
        asked = comm._exchange_sizes
        comm._exchange_sizes = lambda mine, like: asked([1 << 40] * len(mine), like)  # type: ignore[method-assign]
    try:
        train(model, optimizer, rank, 1, start=2)
    except RuntimeError as error:
        return f"{error}"
    return "nothing was said"


def test_a_size_beyond_what_a_bucket_can_need_is_refused_by_all() -> None:
    for said in once(3, announces_too_much):
        assert "rank 1 announces 1099511627776 entries of" in said


def detaches_alone(rank: int, world: int) -> str:
    net = mlp(2)
    optimizer = sgd(net)
    sync = thinwire.distribute(optimizer, net.named_parameters(), recipes.topk(), timeout=30.0)
    train(net, optimizer, rank, 2)
    if rank == 1:
        sync.detach()
        return ""
    try:
        train(net, optimizer, rank, 2, start=2)
    except RankFailed as error:
        return str(error)
    return "nothing was said"


def test_who_leaves_is_named_by_those_who_wait_for_it() -> None:
    said = once(3, detaches_alone)
    assert said[1] == ""
    for text in (said[0], said[2]):
        assert text == "rank 1 has left: it detached, or its process ended"
