"""`distribute` in real gloo processes: the same promises without DDP."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import thinwire
from tests.integration.common import (
    KINDS,
    SMALL_BUCKETS,
    WIDTH,
    batch,
    ddp,
    mlp,
    sgd,
    train,
    weights,
)
from tests.integration.test_ddp import Branches, Convolutional, Tied, same_everywhere
from tests.processes import Pool, once
from thinwire import recipes
from thinwire.combinators import Route

pytestmark = pytest.mark.slow


def distributed(net: nn.Module, optimizer: Any, recipe: Any, **keywords: Any) -> thinwire.Session:
    return thinwire.distribute(
        optimizer, net.named_parameters(), recipe, **{"bucket_mb": SMALL_BUCKETS, **keywords}
    )


def beside_ddp(rank: int, world: int) -> tuple[Tensor, Tensor]:
    net = mlp()
    model, optimizer = ddp(net), sgd(net)
    train(model, optimizer, rank, 20)
    plain = weights(net)
    net = mlp()
    optimizer = sgd(net)
    sync = distributed(net, optimizer, recipes.dense())
    train(net, optimizer, rank, 20)
    assert sync.metrics()["steps"] == 20
    return plain, weights(net)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_dense_is_ddp(pool: Pool, world: int) -> None:
    for plain, ours in pool.run(world, beside_ddp):
        assert torch.allclose(plain, ours, atol=1e-6)


def every_recipe(rank: int, world: int) -> list[Tensor]:
    results = []
    for name in recipes.names():
        net, recipe = mlp(), getattr(recipes, name)()
        optimizer = sgd(net, recipe)
        sync = distributed(net, optimizer, recipe)
        train(net, optimizer, rank, 4)
        assert sync.metrics()["steps"] == 4
        results.append(weights(net))
        sync.detach()
        train(net, optimizer, rank, 1)  # no hook is left behind
        assert sync.metrics()["steps"] == 4
    return results


@pytest.mark.parametrize("world", [1, 2])
def test_every_recipe(pool: Pool, world: int) -> None:
    for results in zip(*pool.run(world, every_recipe), strict=True):
        same_everywhere(list(results))


def different_starts(rank: int, world: int) -> Tensor:
    torch.manual_seed(rank)
    net = nn.Linear(WIDTH, WIDTH)
    net.weight.data = net.weight.data.T  # not contiguous
    net.bias.requires_grad_(False)  # what is not trained is broadcast all the same
    distributed(net, sgd(net), recipes.topk())
    return weights(net)


def test_parameters_are_broadcast_from_rank_zero(pool: Pool) -> None:
    first = same_everywhere(pool.run(3, different_starts))
    torch.manual_seed(0)
    assert torch.equal(first[: WIDTH * WIDTH], nn.Linear(WIDTH, WIDTH).weight.data.T.reshape(-1))


def accumulated(rank: int, world: int, how: str) -> tuple[Tensor, int]:
    net = mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    sync = distributed(net, optimizer, recipes.dense())
    for step in range(5):
        parts = [batch(rank, 10 * step + i) for i in range(3)]
        if how == "whole":
            net(torch.cat(parts)).pow(2).mean().backward()
        else:
            for i, part in enumerate(parts):
                loss = net(part).pow(2).mean() / 3
                if how == "always" or (how == "no_sync" and i == 2):
                    loss.backward()
                else:  # "forgotten": every backward inside no_sync, step() must still average
                    with sync.no_sync():
                        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(net), sync.metrics()["steps"]


def test_gradient_accumulation(pool: Pool) -> None:
    whole = pool.run(2, accumulated, "whole")[0][0]
    for how, steps in (("no_sync", 5), ("always", 15), ("forgotten", 5)):
        for result, taken in pool.run(2, accumulated, how):
            assert torch.allclose(result, whole, atol=1e-5), how
            assert taken == steps


def clipped(rank: int, world: int) -> tuple[Tensor, Tensor]:
    results = []
    for plain in (True, False):
        net = mlp()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        model: nn.Module = net
        if plain:
            model = ddp(net)
        else:
            sync = distributed(net, optimizer, recipes.dense())
        for step in range(5):
            (model(batch(rank, step)) * 30).pow(2).mean().backward()
            if not plain:
                sync.synchronize()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        results.append(weights(net))
    return results[0], results[1]


def test_clipping_sees_averages(pool: Pool) -> None:
    for plain, ours in pool.run(2, clipped):
        assert torch.allclose(plain, ours, atol=1e-6)


def unused(rank: int, world: int, name: str) -> Any:
    net = Branches()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, weight_decay=0.1)
    sync = distributed(net, optimizer, getattr(recipes, name)())
    before = weights(net.never)
    for step in range(4):
        net(batch(rank, step), rank if step < 2 else 0).pow(2).mean().backward()
        assert net.never.weight.grad is None
        assert (net.right.weight.grad is None) == (step >= 2), "used by one rank: all get the mean"
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(before, weights(net.never)), "weight decay must not touch unused parameters"
    return weights(net), sync.metrics()["steps"]


@pytest.mark.parametrize("name", KINDS)
def test_unused_parameters(pool: Pool, name: str) -> None:
    results = pool.run(2, unused, name)
    same_everywhere([w for w, _ in results])
    assert [steps for _, steps in results] == [4, 4]


def a_rank_without_any_gradient(rank: int, world: int) -> tuple[Tensor, Tensor, int]:
    """Trained here, the same on one worker with all batches, and how many steps it took."""
    net, whole = mlp(2), mlp(2)
    optimizer, alone = sgd(net), sgd(whole)
    sync = distributed(net, optimizer, recipes.dense())
    for step in range(4):
        for other in range(world):
            if other != step % world:
                (whole(batch(other, step)).pow(2).mean() / world).backward()
        alone.step()
        alone.zero_grad()
        if rank != step % world:
            net(batch(rank, step)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(net), weights(whole), sync.metrics()["steps"]


def test_a_rank_without_any_gradient_plays_along(pool: Pool) -> None:
    """In its own turn: were each to miss another exchange, all would still be the same."""
    results = pool.run(3, a_rank_without_any_gradient)
    same_everywhere([w for w, _, _ in results])
    for ours, whole, steps in results:
        assert steps == 4
        assert torch.allclose(ours, whole, atol=1e-6)


def scaled(rank: int, world: int, name: str) -> Any:
    net = mlp()
    optimizer = sgd(net)
    scaler = torch.amp.GradScaler(
        "cpu", init_scale=2.0**127, growth_interval=3, backoff_factor=2.0**-40
    )
    sync = distributed(net, optimizer, getattr(recipes, name)(), scaler=scaler)
    for step in range(8):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = net(batch(rank, step)).float().pow(2).mean() * 1e3
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return weights(net), sync.metrics()


@pytest.mark.parametrize("name", ["dense", "topk", "acpsgd"])
def test_grad_scaler(pool: Pool, name: str) -> None:
    results = pool.run(2, scaled, name)
    same_everywhere([w for w, _ in results])
    for _, metrics in results:
        assert metrics["steps"] == 8
        assert 1 <= metrics["skipped_steps"] < 8


def tied(rank: int, world: int) -> Tensor:
    net = Tied()
    optimizer = torch.optim.SGD(
        [
            {"params": [net.encode.weight], "lr": 0.1},
            {"params": [net.encode.bias, net.decode.bias]},
        ],
        lr=0.01,
    )
    named = net.named_parameters(remove_duplicate=False)
    thinwire.distribute(optimizer, named, recipes.adtopk(density=0.1))
    train(net, optimizer, rank, 5)
    return weights(net)


def test_tied_parameters_and_param_groups(pool: Pool) -> None:
    same_everywhere(pool.run(2, tied))


def channels_last(rank: int, world: int) -> list[Tensor]:
    results = []
    for memory_format in (torch.contiguous_format, torch.channels_last):
        net = Convolutional().to(memory_format=memory_format)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        distributed(net, optimizer, recipes.adtopk(density=0.05))
        for step in range(4):
            images = batch(rank, step, 2, 3, 8, 8).to(memory_format=memory_format)
            net(images).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(torch.cat([p.detach().contiguous().reshape(-1) for p in net.parameters()]))
    return results


def test_channels_last(pool: Pool) -> None:
    for contiguous, last in pool.run(2, channels_last):
        assert torch.allclose(contiguous, last, atol=1e-4)


def resumed(rank: int, world: int, name: str) -> tuple[Tensor, Tensor]:
    saved, recipe = io.BytesIO(), getattr(recipes, name)()
    net = mlp()
    optimizer = sgd(net, recipe)
    sync = distributed(net, optimizer, recipe)
    train(net, optimizer, rank, 5)
    state = {"net": net.state_dict(), "opt": optimizer.state_dict(), "sync": sync.state_dict()}
    torch.save(state, saved)
    train(net, optimizer, rank, 5, start=5)
    straight = weights(net)
    saved.seek(0)
    state = torch.load(saved, weights_only=True)
    net = mlp()
    net.load_state_dict(state["net"])
    optimizer = sgd(net, recipe)
    optimizer.load_state_dict(state["opt"])
    sync = distributed(net, optimizer, recipe)
    sync.load_state_dict(state["sync"])
    train(net, optimizer, rank, 5, start=5)
    return straight, weights(net)


@pytest.mark.parametrize("name", KINDS)
def test_resume_is_bit_exact(pool: Pool, name: str) -> None:
    for straight, again in pool.run(3, resumed, name):
        assert torch.equal(straight, again)


def with_closure(rank: int, world: int) -> Tensor:
    net = mlp(2)
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=3)
    distributed(net, optimizer, recipes.dense())

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = net(batch(rank, 0)).pow(2).mean()
        loss.backward()
        return loss.detach()  # differs by rank: without a line search nothing depends on it

    optimizer.step(closure)
    return weights(net)


def test_optimizers_with_a_closure(pool: Pool) -> None:
    same_everywhere(pool.run(2, with_closure))


def checkpointed(rank: int, world: int) -> Tensor:
    net = mlp()
    optimizer = sgd(net)
    distributed(net, optimizer, recipes.topk(density=0.1))
    for step in range(3):
        x = batch(rank, step)
        for layer in net:
            x = checkpoint(layer, x, use_reentrant=False)
        x.pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(net)


def test_activation_checkpointing(pool: Pool) -> None:
    same_everywhere(pool.run(2, checkpointed))


def grown(rank: int, world: int) -> str:
    net, more = mlp(2), nn.Linear(WIDTH, WIDTH)
    optimizer = sgd(net)
    distributed(net, optimizer, recipes.dense())
    train(net, optimizer, rank, 1)
    optimizer.add_param_group({"params": more.parameters()})
    try:
        train(net, optimizer, rank, 1)
    except ValueError as error:
        return str(error)
    return "nothing was said"


def test_parameters_added_later_are_refused(pool: Pool) -> None:
    assert "was added to the optimizer or unfrozen" in pool.run(2, grown)[0]


def thawed(rank: int, world: int) -> str:
    net = mlp(2)
    net[0].weight.requires_grad_(False)
    optimizer = sgd(net)
    distributed(net, optimizer, recipes.dense())
    train(net, optimizer, rank, 1)
    net[0].weight.requires_grad_(True)
    try:
        train(net, optimizer, rank, 1)
    except ValueError as error:
        return str(error)
    return "nothing was said"


def test_parameters_unfrozen_later_are_refused(pool: Pool) -> None:
    assert "was added to the optimizer or unfrozen" in pool.run(2, thawed)[0]


def twice(rank: int, world: int) -> str:
    net = mlp(2)
    optimizer = sgd(net)
    sync = distributed(net, optimizer, recipes.dense())
    try:
        distributed(net, optimizer, recipes.dense())
    except ValueError as error:
        sync.detach()
        distributed(net, optimizer, recipes.topk())
        train(net, optimizer, rank, 2)
        return str(error)
    return "nothing was said"


def test_an_optimizer_is_distributed_once(pool: Pool) -> None:
    assert "distributed already; call detach()" in pool.run(2, twice)[0]


def reentrant(rank: int, world: int, which: tuple[int, ...]) -> tuple[str, Tensor]:
    net = mlp(6)
    optimizer = sgd(net)
    distributed(net, optimizer, recipes.topk(density=0.1))
    said = ""
    for step in range(3):
        x = batch(rank, step).requires_grad_()
        for number, layer in enumerate(net):
            x = checkpoint(layer, x, use_reentrant=True) if number in which else layer(x)
        try:
            x.pow(2).mean().backward()
        except RuntimeError as error:
            said = str(error)
            break
        optimizer.step()
        optimizer.zero_grad()
    return said, weights(net)


def test_reentrant_checkpoints_work_or_are_refused(pool: Pool) -> None:
    """Autograd gives no sign that a nested backward has an outer one before its first gradient."""
    plain = pool.run(2, reentrant, ())
    inner = pool.run(2, reentrant, (4,))
    for (_, expected), (said, got) in zip(plain, inner, strict=True):
        assert said == ""
        assert torch.equal(expected, got)
    assert all("use_reentrant=False" in said for said, _ in once(2, reentrant, tuple(range(12))))


def uneven(rank: int, world: int, name: str) -> tuple[Tensor, int, Tensor | None]:
    reference = None
    if name == "dense":
        net = mlp()
        model, optimizer = ddp(net), torch.optim.SGD(net.parameters(), lr=0.1)
        with model.join():
            train(model, optimizer, rank, 3 + 2 * rank)
        reference = weights(net)
    net = mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    sync = distributed(net, optimizer, getattr(recipes, name)())
    with sync.join():
        train(net, optimizer, rank, 3 + 2 * rank)
    return weights(net), sync.metrics()["steps"], reference


@pytest.mark.parametrize("name", KINDS)
def test_join_with_uneven_inputs(pool: Pool, name: str) -> None:
    results = pool.run(3, uneven, name)
    same_everywhere([w for w, _, _ in results])
    for ours, steps, reference in results:
        assert steps == 7
        if reference is not None:
            assert torch.allclose(ours, reference, atol=1e-6)


def paused(rank: int, world: int) -> tuple[Tensor, float, float]:
    net = mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    recipe = Route(lambda slot: slot.name.endswith("bias"), recipes.dense(), recipes.topk(0.05))
    sync = distributed(net, optimizer, recipe)

    def held() -> float:
        slots = sync.state_dict()["slots"].values()
        parts = [part for slot in slots for part in slot.values() if "residual" in part]
        return float(sum(part["residual"].abs().sum() for part in parts))

    train(net, optimizer, rank, 3)
    before = held()
    sync.pause()
    train(net, optimizer, rank, 1, start=3)
    after = held()
    sync.resume()
    train(net, optimizer, rank, 2, start=4)
    return weights(net), before, after


def test_pause_delivers_residuals_wherever_they_are(pool: Pool) -> None:
    results = pool.run(2, paused)
    same_everywhere([w for w, _, _ in results])
    assert all(before > 0 and after == 0 for _, before, after in results)


def density_with_unused(rank: int, world: int) -> float:
    net = Branches()
    optimizer = sgd(net)
    sync = distributed(net, optimizer, recipes.topk(density=0.01))
    for step in range(3):
        net(batch(rank, step), 0).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return float(sync.metrics()["density"])


def test_density_is_what_was_sent(pool: Pool) -> None:
    assert all(0.005 < density < 0.02 for density in pool.run(2, density_with_unused))


class Fragile(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, fail: bool) -> Tensor:
        ctx.fail = fail
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        if ctx.fail:
            raise ArithmeticError("this backward breaks off")
        return grads[0], None


def cut_short(rank: int, world: int) -> tuple[Tensor, Tensor]:
    """A backward that breaks off on all ranks and is caught: the next one works."""
    net = mlp(6)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    sync = distributed(net, optimizer, recipes.topk(density=0.1))
    for step in range(6):
        for fail in (True, False) if step == 3 else (False,):
            x = net[:6](batch(rank, step))
            loss = net[6:](Fragile.apply(x, fail)).pow(2).mean()
            try:
                loss.backward()
            except ArithmeticError:
                optimizer.zero_grad()
        optimizer.step()
        optimizer.zero_grad()
    assert sync.metrics()["steps"] == 6
    return weights(net), sum(
        s["memory"]["residual"].abs().sum() for s in sync.state_dict()["slots"].values()
    )


def test_a_backward_that_breaks_off(pool: Pool) -> None:
    results = pool.run(2, cut_short)
    same_everywhere([w for w, _ in results])
