"""Steps: all buckets or none, in threads, with peers that always agree."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from thinwire import recipes
from thinwire.comm import local
from thinwire.engine.checkpoint import copied
from thinwire.engine.steps import Arrival, Steps
from thinwire.layout import Layout

LAYOUTS = [Layout.of({f"{i}.w": torch.empty(8, 10), f"{i}.b": torch.empty(8)}) for i in range(3)]


class Agreeing:
    """Peers over threads."""

    def __init__(self, comm: Any) -> None:
        self.comm = comm

    def agree(self, subject: str, lines: list[str]) -> None:
        pass

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
        before = copied(steps.root)
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
        before = copied(steps.root)
        take(steps, comm.rank, 1, upto=2)
        steps.roll_back()
        for bucket in range(2):
            x = residual(before, bucket) + grads(comm.rank, 1, bucket)
            assert torch.allclose(residual(steps.root, bucket), x, atol=1e-5)
        assert torch.equal(residual(steps.root, 2), residual(before, 2))
        take(steps, comm.rank, 2)
        assert steps.number == 2

    local.run(3, worker)


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
