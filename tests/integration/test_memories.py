"""Memories that know the optimizer: its learning rates, and a second momentum refused."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thinwire
from tests.integration.common import SMALL_BUCKETS, batch, ddp, mlp, train, weights
from tests.processes import Pool
from thinwire import recipes
from thinwire.memory import MomentumCorrected, Residual
from thinwire.schedule import Piecewise

pytestmark = pytest.mark.slow
SAMPLE = Piecewise((3,), (0.5, 0.1))  # a number that is a schedule
RATED = recipes.topk(density=0.1, memory=Residual(learning_rate=True))


def set_up(mode: str, recipe: Any, optimizer: Any, net: nn.Module) -> tuple[Any, nn.Module]:
    if mode == "attach":
        model = ddp(net)
        return thinwire.attach(model, recipe, optimizer=optimizer), model
    named = net.named_parameters()
    return thinwire.distribute(optimizer, named, recipe, bucket_mb=SMALL_BUCKETS), net


def refused(rank: int, world: int, mode: str) -> list[str]:
    said = []
    net = mlp(2)
    optimizers = [
        torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9),
        torch.optim.Adam(net.parameters()),
    ]
    for optimizer in optimizers:
        for recipe in (recipes.dgc(), recipes.topk(memory="momentum")):
            with pytest.raises(ValueError, match="momentum would be applied twice") as error:
                set_up(mode, recipe, optimizer, net)
            said.append(str(error.value))
    # without momentum of its own, and with another memory, both are fine
    sync, _ = set_up(mode, recipes.dgc(), torch.optim.SGD(net.parameters(), lr=0.1), net)
    sync.detach()
    set_up(mode, recipes.dgc(memory="residual"), optimizers[0], net)
    return said


@pytest.mark.parametrize("mode", ["attach", "distribute"])
def test_momentum_is_not_applied_twice(pool: Pool, mode: str) -> None:
    for said in pool.run(2, refused, mode):
        assert "SGD (momentum 0.9 in parameter group 0)" in said[0]
        assert "give the optimizer none, or use memory='residual'" in said[0]
        assert "Adam (momentum 0.9" in said[2]


def without_optimizer(rank: int, world: int) -> None:
    net = mlp(2)
    half = torch.optim.SGD(net[0].parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"2.weight is in no group of the optimizer"):
        thinwire.attach(ddp(net), RATED, optimizer=half)
    with pytest.raises(ValueError, match=r"must see the rates: pass attach.*optimizer=optimizer"):
        thinwire.attach(ddp(mlp(2)), RATED)
    for recipe in (
        recipes.dgc(),
        recipes.topk(memory="momentum"),
        recipes.dgc(warmup=3, sample=SAMPLE),
    ):
        with pytest.raises(ValueError, match=r"must see that.* none: pass attach.*=optimizer"):
            thinwire.attach(ddp(mlp(2)), recipe)


def test_learning_rates_and_momentum_need_the_optimizer(pool: Pool) -> None:
    pool.run(1, without_optimizer)


def rated(rank: int, world: int, mode: str) -> tuple[Tensor, Tensor]:
    """SGD under a falling rate, two groups, with the rate inside; and the same written out."""
    rates = [0.2, 0.2, 0.05, 0.0, 0.05, 0.01]
    net = mlp(2)
    first, second = list(net[0].parameters()), list(net[2].parameters())
    optimizer = torch.optim.SGD([{"params": first}, {"params": second}], lr=0.2)
    sync, model = set_up(mode, RATED, optimizer, net)
    for step, rate in enumerate(rates):
        optimizer.param_groups[0]["lr"], optimizer.param_groups[1]["lr"] = rate, rate / 2
        model(batch(0, step)).pow(2).mean().backward()  # the same on all ranks: mean == own
        optimizer.step()
        optimizer.zero_grad()
    assert sync.metrics()["skipped_steps"] == 0

    other = mlp(2)
    residual = [torch.zeros_like(p) for p in other.parameters()]
    for step, rate in enumerate(rates):
        other(batch(0, step)).pow(2).mean().backward()
        for i, p in enumerate(other.parameters()):
            mine = rate if i < 2 else rate / 2
            x = residual[i] + mine * p.grad
            k = max(1, int(0.1 * p.numel() + 0.5))
            sent = torch.zeros(p.numel())
            best = x.reshape(-1).abs().topk(k).indices
            if mine:
                sent[best] = x.reshape(-1)[best]
            residual[i] = x - sent.view_as(x)
            p.data -= sent.view_as(x)
            p.grad = None
    return weights(net), weights(other)


@pytest.mark.parametrize("mode", ["attach", "distribute"])
def test_the_rate_inside_the_residual(pool: Pool, mode: str) -> None:
    for ours, written_out in pool.run(2, rated, mode):
        assert torch.allclose(ours, written_out, atol=1e-6)


def momentum_beside_sgd(rank: int, world: int) -> tuple[Tensor, Tensor]:
    """At full density, momentum before the exchange is momentum after it."""
    results = []
    for own in (True, False):
        net = mlp(3)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9 if own else 0.0)
        recipe = recipes.dense() if own else recipes.dgc(memory=MomentumCorrected(), warmup=1000)
        _, model = set_up("attach", recipe, optimizer, net)
        train(model, optimizer, rank, 10)
        results.append(weights(net))
    return results[0], results[1]


def test_in_a_dense_warm_up_dgc_is_plain_momentum(pool: Pool) -> None:
    for plain, ours in pool.run(2, momentum_beside_sgd):
        assert torch.allclose(plain, ours, atol=1e-5)


def resumed(rank: int, world: int, call: str) -> tuple[Tensor, Tensor]:
    saved = io.BytesIO()
    net, recipe = mlp(4), recipes.parse(call)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    sync, model = set_up("attach", recipe, optimizer, net)
    train(model, optimizer, rank, 35)
    torch.save({"net": net.state_dict(), "sync": sync.state_dict()}, saved)
    train(model, optimizer, rank, 10, start=35)
    straight = weights(net)
    saved.seek(0)
    state = torch.load(saved, weights_only=True)
    net = mlp(4)
    net.load_state_dict(state["net"])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    sync, model = set_up("attach", recipe, optimizer, net)
    sync.load_state_dict(state["sync"])
    train(model, optimizer, rank, 10, start=35)
    return straight, weights(net)


@pytest.mark.parametrize(
    "call",
    [
        "adtopk(density=0.05, interleave=True, estimate=True)",
        "adtopk(density=0.05, interleave=(2, 1), no_feedback=['^0'])",
        "topk(density=0.05, refresh=7)",
        "powersgd(rank=stages((1, 3), 40))",
        "sidco(density=Ramp(start=0.2, end=0.05, steps=40))",
    ],
)
def test_variants_resume_bit_exactly(pool: Pool, call: str) -> None:
    for straight, again in pool.run(3, resumed, call):
        assert torch.equal(straight, again)


def broken_gradient(rank: int, world: int) -> list[Any]:
    """One rank meets a NaN in the last bucket: u and v of the others are as if nothing was sent."""
    found = []
    for call in ("dgc(density=0.05)", "adtopk(density=0.05, interleave=True, estimate=True)"):
        net, recipe = mlp(4), recipes.parse(call)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        sync, model = set_up("attach", recipe, optimizer, net)
        train(model, optimizer, rank, 3)
        before = {n: p.detach().clone() for n, p in net.named_parameters()}
        handle = net[0].weight.register_hook(
            lambda grad: grad * float("nan") if rank == 1 else grad
        )
        model(batch(rank, 3)).pow(2).mean().backward()
        bad = any(not p.grad.isfinite().all() for p in net.parameters())
        handle.remove()
        optimizer.zero_grad()
        state = sync.state_dict()["slots"]
        kept = [t for s in state.values() for part in s.values() for t in part.values()]
        whole = all(t.isfinite().all() for t in kept if isinstance(t, Tensor))
        same = all(torch.equal(before[n], p) for n, p in net.named_parameters())
        train(model, optimizer, rank, 3, start=4)
        found.append((bad, whole, same, sync.metrics()["skipped_steps"], weights(net)))
    return found


def test_a_broken_gradient_leaves_new_memories_whole(pool: Pool) -> None:
    results = pool.run(3, broken_gradient)
    for per_recipe in zip(*results, strict=True):
        for bad, whole, same, skipped, w in per_recipe:
            assert (bad, whole, same, skipped) == (True, True, True, 1)
            assert torch.equal(w, per_recipe[0][4])
