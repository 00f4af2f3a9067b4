"""Steps: all buckets or none, in threads, with peers that always agree."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from thinwire import recipes
from thinwire.comm import local
from thinwire.engine.checkpoint import copy_trees
from thinwire.engine.steps import Arrival, Steps
from thinwire.layout import Layout

LAYOUTS = [Layout.of({f"{i}.w": torch.empty(8, 10), f"{i}.b": torch.empty(8)}) for i in range(3)]


class Agreeing:
    """Peers over threads, and what they were asked to agree on."""

    def __init__(self, comm: Any) -> None:
        self.comm = comm
        self.device = torch.device("cpu")
        self.asked: list[list[str]] = []

    def agree(self, subject: str, lines: list[str]) -> None:
        self.asked.append(lines)

    def average_sparse(self, grad: torch.Tensor) -> torch.Tensor:
        everyone = self.comm.all_gather(grad.to_dense().reshape(-1))
        return (torch.stack(everyone).mean(0).view(grad.shape)).to_sparse(1).coalesce()

    def at(self, step: int, bucket: int, entries: int) -> None:
        pass

    def done(self) -> None:
        pass

    def meet(self, what: str) -> None:
        self.comm.barrier()


def grads(rank: int, step: int, bucket: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(100 * step + 10 * bucket + rank)
    return torch.randn(LAYOUTS[bucket].numel, generator=draw)


def take(steps: Steps, rank: int, step: int, bad: int | None = None, upto: int = 3) -> list[Any]:
    results = []
    for bucket in range(upto):
        flat = grads(rank, step, bucket)
        if bucket == bad and rank == 1:
            flat[3] = float("nan")
        results.append(
            steps.reduce(
                Arrival(flat=flat, layout=LAYOUTS[bucket], first=bucket == 0, last=bucket == 2)
            )
        )
    return results


def residual(state: dict[str, Any], bucket: int) -> torch.Tensor:
    slots = [state["slots"][slot.name]["memory"]["residual"] for slot in LAYOUTS[bucket].slots]
    return torch.cat([r.reshape(-1) for r in slots])


@pytest.mark.parametrize("bad", [0, 1, 2])
@pytest.mark.parametrize("name", ["topk", "adtopk", "randomk", "powersgd", "acpsgd"])
def test_a_nan_in_one_bucket_undoes_all_of_the_step(name: str, bad: int) -> None:
    def worker(comm: Any) -> None:
        steps = Steps(getattr(recipes, name)(), Agreeing(comm))  # type: ignore[arg-type]
        take(steps, comm.rank, 0)
        before = copy_trees(steps.root)
        take(steps, comm.rank, 1, bad=bad)
        assert (steps.number, steps.meter.committed, steps.meter.skipped) == (1, 1, 1)
        for bucket in range(3):
            x = residual(before, bucket) + grads(comm.rank, 1, bucket)
            if bucket == bad and comm.rank == 1:
                x[3] = residual(before, bucket)[3]  # the NaN itself is left out
            assert torch.allclose(residual(steps.root, bucket), x, atol=1e-5), "sent nothing: x"
            for slot in LAYOUTS[bucket].slots:
                old = before["slots"][slot.name].get("frame", {})
                new = steps.root["slots"][slot.name].get("frame", {})
                assert old.get("side") == new.get("side")
                assert old.get("basis") is None or torch.equal(old["basis"], new["basis"])
        results = take(steps, comm.rank, 2)
        assert all(r.finite for r in results)
        assert steps.number == 2

    local.run(2, worker)


@pytest.mark.parametrize("name", ["topk", "acpsgd"])
def test_a_step_that_was_cut_short_is_undone(name: str) -> None:
    def worker(comm: Any) -> None:
        steps = Steps(getattr(recipes, name)(), Agreeing(comm))  # type: ignore[arg-type]
        take(steps, comm.rank, 0)
        before = copy_trees(steps.root)
        take(steps, comm.rank, 1, upto=2)
        steps.roll_back()
        for bucket in range(2):
            x = residual(before, bucket) + grads(comm.rank, 1, bucket)
            assert torch.allclose(residual(steps.root, bucket), x, atol=1e-5)
        assert torch.equal(residual(steps.root, 2), residual(before, 2))
        take(steps, comm.rank, 2)
        assert steps.number == 2

    local.run(3, worker)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("name", ["topk", "acpsgd"])
def test_the_next_steps_first_bucket_undoes_a_step_that_was_cut_short(
    name: str, sparse: bool
) -> None:
    """Nobody says that it was: the backward that raised did not come to its end."""

    def worker(comm: Any) -> None:
        steps = Steps(getattr(recipes, name)(), Agreeing(comm))  # type: ignore[arg-type]
        take(steps, comm.rank, 0)
        before = copy_trees(steps.root)
        take(steps, comm.rank, 1, upto=2)
        if sparse:
            steps.reduce_sparse(torch.eye(3).to_sparse(1), first=True, last=False)
        else:
            take(steps, comm.rank, 2, upto=1)
        x = residual(before, 1) + grads(comm.rank, 1, 1)
        assert torch.allclose(residual(steps.root, 1), x, atol=1e-5), "sent nothing: x"
        for slot in LAYOUTS[1].slots:  # nor has a frame learned of it
            assert "side" not in steps._now.draft.get(("slots", slot.name, "frame"), {})

    local.run(2, worker)


@pytest.mark.parametrize("last", [False, True])
def test_a_nan_in_a_sparse_gradient_undoes_all_of_the_step(last: bool) -> None:
    def worker(comm: Any) -> None:
        steps = Steps(recipes.topk(), Agreeing(comm))  # type: ignore[arg-type]
        take(steps, comm.rank, 0)
        before = copy_trees(steps.root)
        grad = torch.ones(4, 3)
        grad[2, 1] = float("nan") if comm.rank == 1 else 1.0

        def give_dense(first: bool) -> None:
            flat = grads(comm.rank, 1, 0)
            steps.reduce(Arrival(flat=flat, layout=LAYOUTS[0], first=first, last=not first))

        if last:
            give_dense(first=True)
        mean = steps.reduce_sparse(grad.to_sparse(1), first=not last, last=last)
        if not last:
            give_dense(first=False)
        assert not mean.to_dense().isfinite().all(), "GradScaler sees it"
        assert (steps.number, steps.meter.committed, steps.meter.skipped) == (1, 1, 1)
        x = residual(before, 0) + grads(comm.rank, 1, 0)
        assert torch.allclose(residual(steps.root, 0), x, atol=1e-5), "sent nothing: x"

    local.run(2, worker)


def saved(steps: Steps) -> dict[str, Any]:
    trees = copy_trees(steps.root)
    return {**trees, "step": steps.number, "next": steps.next, "buckets": steps.buckets}


def test_steps_are_compared_again_after_a_state_was_loaded() -> None:
    """Ranks that loaded different ones must not find out in the middle of an exchange."""

    def worker(comm: Any) -> None:
        peers = Agreeing(comm)
        steps = Steps(recipes.topk(), peers)  # type: ignore[arg-type]
        take(steps, comm.rank, 0)
        take(steps, comm.rank, 1)
        assert [lines[0] for lines in peers.asked] == ["step 0"] * 3, "once per bucket"
        steps.load(saved(steps))
        take(steps, comm.rank, 2)
        assert [lines[0] for lines in peers.asked[3:]] == ["step 2"] * 3

    local.run(2, worker)


@pytest.mark.parametrize("name", ["topk", "half", "gtopk"])
def test_one_large_bucket_is_taken_in_the_saved_ones_and_in_their_order(name: str) -> None:
    everything = [slot for layout in LAYOUTS for slot in layout.slots]
    large = Layout.packed(everything[::-1])  # not the order in which they were saved

    def worker(comm: Any) -> None:
        steps, peers = [], []
        for _ in range(2):
            peers.append(Agreeing(comm))
            steps.append(Steps(getattr(recipes, name)(), peers[-1]))
        straight, resumed = steps
        take(straight, comm.rank, 0)
        order = [[slot.name for slot in layout.slots] for layout in LAYOUTS]
        assert straight.next == straight.buckets == order
        resumed.load(saved(straight))
        peers[1].asked.clear()
        for step in (1, 2):
            separate = take(straight, comm.rank, step)
            values = {
                slot.name: grads(comm.rank, step, b)[slot.offset : slot.offset + slot.numel]
                for b, layout in enumerate(LAYOUTS)
                for slot in layout.slots
            }
            flat = torch.cat([values[slot.name] for slot in large.slots])
            whole = resumed.reduce(Arrival(flat=flat, layout=large, first=True, last=True)).mean
            for layout, part in zip(LAYOUTS, separate, strict=True):
                for slot in layout.slots:
                    here = next(s for s in large.slots if s.name == slot.name)
                    assert torch.equal(here.view(whole), slot.view(part.mean))
            assert resumed.next == resumed.buckets == order
        asked = [[line.split()[0] for line in lines[1:]] for lines in peers[1].asked]
        assert asked == order
        resumed.reduce(Arrival(flat=flat, layout=large, first=True, last=True))
        assert resumed.buckets == [[slot.name for slot in large.slots]], "only until DDP has"

    local.run(2, worker)


def test_bytes_and_density_are_counted() -> None:
    def worker(comm: Any) -> None:
        steps = Steps(recipes.topk(density=0.1), Agreeing(comm))  # type: ignore[arg-type]
        for step in range(4):
            take(steps, comm.rank, step)
        expected = sum(recipes.topk(density=0.1).traffic(layout, 3).bytes for layout in LAYOUTS)
        assert steps.comm.bytes == 4 * expected
        assert steps.meter.entries == 4 * 3 * (8 + 1)
        assert steps.meter.numel == 4 * 3 * 88
        assert steps.meter.bytes_dense == 4 * 3 * (2 * 2 * 88 * 4 // 3)

    local.run(3, worker)
