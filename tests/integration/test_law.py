"""The contracts where users meet them: inside gloo processes, through both engines.

After `backward()` every `p.grad` is the mean, the mean is the average of what the ranks sent, and
what was not sent is in the residual.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import thinwire
from tests.integration.common import SMALL_BUCKETS, batch, ddp, mlp
from tests.processes import Pool
from thinwire import recipes
from thinwire.memory import Residual

pytestmark = pytest.mark.slow


class Recorder:
    """A reducer that writes down what another one was given and gave."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.seen = inner, []

    def reduce(self, bucket: Any, comm: Any) -> Any:
        grad = bucket.flat.clone()
        before = self._residual(bucket)
        reduced = self.inner.reduce(bucket, comm)
        sent = reduced.sent.add_into(torch.zeros_like(grad))
        record = (bucket.layout, grad, before, sent, self._residual(bucket), reduced.mean.clone())
        self.seen.append(record)
        return reduced

    def traffic(self, layout: Any, world: int, step: int = 0) -> Any:
        return self.inner.traffic(layout, world, step)

    @staticmethod
    def _residual(bucket: Any) -> Tensor | None:
        homes = [bucket.state.get("slots", {}).get(s.name, {}) for s in bucket.layout.slots]
        parts = [home.get("memory", {}).get("residual") for home in homes]
        if any(part is None for part in parts):
            return None
        return torch.cat([part.reshape(-1) for part in parts]).clone()


# Collectives that no recipe has by itself, and ways of writing them.
MORE = (
    "topk(collective='two_level(2)', density=0.05)",
    "oktopk(density=0.05)",
    "gtopk(tree=True, density=0.05)",
    "adtopk(collective='cheapest', wire='bf16+auto', density=0.05)",
)


def law(rank: int, world: int, mode: str) -> dict[str, int]:
    counts = {}
    for name in recipes.names() if world == 3 else MORE:
        inner = recipes.parse(name)
        # decay and momentum are written out in tests/contracts
        plain = getattr(inner, "memory", None) == Residual()
        recipe = Recorder(inner)
        net = mlp(4)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        model: nn.Module = net
        if mode == "attach":
            model = ddp(net)
            thinwire.attach(model, recipe, optimizer=optimizer)
        else:
            thinwire.distribute(optimizer, net.named_parameters(), recipe, bucket_mb=SMALL_BUCKETS)
        named = dict(net.named_parameters())
        for step in range(4):
            recipe.seen.clear()
            model(batch(rank, step)).pow(2).mean().backward()
            for layout, grad, before, sent, after, mean in recipe.seen:
                average = sent.double()
                dist.all_reduce(average)
                assert torch.allclose(mean.double(), average / world, atol=1e-7), name
                if after is not None and plain:
                    x = grad + (before if before is not None else 0.0)
                    assert torch.allclose(x, sent + after, atol=1e-6), name
                for slot in layout.slots:
                    assert torch.equal(named[slot.name].grad, slot.view(mean)), name
            counts[name] = len(recipe.seen)
            optimizer.step()
            optimizer.zero_grad()
    return counts


@pytest.mark.parametrize("mode", ["attach", "distribute"])
@pytest.mark.parametrize("world", [3, 4])
def test_the_law_in_processes(pool: Pool, world: int, mode: str) -> None:
    for counts in pool.run(world, law, mode):
        assert set(counts) == set(recipes.names() if world == 3 else MORE)
        assert all(count >= 2 for count in counts.values()), "several buckets"


class Waiting:
    """A reducer that, in its first bucket, waits until backward has reached the first layer."""

    def __init__(self) -> None:
        self.reached, self.overlapped = threading.Event(), False
        self.waits = False

    def reduce(self, bucket: Any, comm: Any) -> Any:
        if self.waits:
            self.overlapped = self.reached.wait(timeout=20)
            self.waits = False
        return recipes.dense().reduce(bucket, comm)


def overlap(rank: int, world: int, mode: str) -> bool:
    net = mlp(6)
    recipe = Waiting()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model: nn.Module = net
    if mode == "attach":
        model = ddp(net)
        thinwire.attach(model, recipe, timeout=40.0)
    else:
        thinwire.distribute(
            optimizer, net.named_parameters(), recipe, bucket_mb=SMALL_BUCKETS, timeout=40.0
        )
    for _ in range(2):  # buckets are cut after the first step
        model(batch(rank, 0)).pow(2).mean().backward()
        optimizer.zero_grad()
    net[0].weight.register_hook(lambda grad: recipe.reached.set())
    recipe.waits = True
    model(batch(rank, 1)).pow(2).mean().backward()
    return recipe.overlapped


@pytest.mark.parametrize("mode", ["attach", "distribute"])
def test_buckets_are_reduced_while_backward_goes_on(pool: Pool, mode: str) -> None:
    assert pool.run(2, overlap, mode) == [True, True]
