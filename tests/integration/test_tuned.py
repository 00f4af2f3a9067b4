"""`tuned` in a training: it moves SGD's momentum, puts it back, and survives a checkpoint."""

from __future__ import annotations

import io
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thinwire
from tests.integration.common import SMALL_BUCKETS, ddp, mlp, train, weights
from tests.processes import Pool
from thinwire import recipes
from thinwire.memory import MomentumCorrected
from thinwire.recipes.tuned import Tuned

pytestmark = pytest.mark.slow
STEPS = 40
TUNED = recipes.tuned(saving=12, steps=STEPS)


def sgd(net: nn.Module, **options: Any) -> torch.optim.SGD:
    return torch.optim.SGD(net.parameters(), **{"lr": 0.1, "momentum": 0.9, **options})


def set_up(mode: str, net: nn.Module, recipe: Any, optimizer: Any) -> tuple[Any, nn.Module]:
    if mode == "attach":
        model = ddp(net)
        return thinwire.attach(model, recipe, optimizer), model
    return thinwire.distribute(net, recipe, optimizer, bucket_mb=SMALL_BUCKETS), net


def by_hand_and_tuned(rank: int, world: int, mode: str) -> tuple[Tensor, Tensor, list[Any]]:
    ends = []
    for recipe, options in (
        (TUNED, {"momentum": 0.9, "weight_decay": 1e-3, "nesterov": True}),
        (
            TUNED.choose(world, 3 * 33 * 32, momentum=0.9, nesterov=True),  # type: ignore[attr-defined]
            {"momentum": 0.0, "weight_decay": 1e-3 / (1 - 0.9)},
        ),
    ):
        net = mlp(3)
        optimizer = sgd(net, **options)
        sync, model = set_up(mode, net, recipe, optimizer)
        train(model, optimizer, rank, 12)
        ends.append(weights(net))
        groups = [dict(group) for group in optimizer.param_groups]
        sync.detach()
    return ends[0], ends[1], groups


@pytest.mark.parametrize("mode", ["attach", "distribute"])
def test_tuned_is_the_setting_that_people_would_write_by_hand(pool: Pool, mode: str) -> None:
    for tuned, by_hand, _ in pool.run(2, by_hand_and_tuned, mode):
        assert torch.equal(tuned, by_hand)


def moved_and_back(rank: int, world: int) -> dict[str, Any]:
    net = mlp(3)
    optimizer = sgd(net, weight_decay=1e-3)
    sync, model = set_up("attach", net, TUNED, optimizer)
    (group,) = optimizer.param_groups
    found = {"moved": (group["momentum"], group["weight_decay"])}
    train(model, optimizer, rank, 6)
    found["buffers before"] = len(optimizer.state_dict()["state"])
    sync.pause()
    found["paused"] = (group["momentum"], group["weight_decay"])
    buffers = [optimizer.state[p]["momentum_buffer"].clone() for p in net.parameters()]
    found["buffers"] = torch.cat([b.reshape(-1) for b in buffers])
    train(model, optimizer, rank, 3, start=6)
    found["weights"] = weights(net)
    held = [v for name, v in flat_state(sync.state_dict()) if name.endswith("residual")]
    found["left"] = max(float(v.abs().max()) for v in held)
    found["momenta while paused"] = sum(
        name.endswith("momentum") for name, _ in flat_state(sync.state_dict())
    )
    sync.resume()
    found["resumed"] = group["momentum"]
    train(model, optimizer, rank, 3, start=9)
    found["after"] = weights(net)
    sync.detach()
    found["detached"] = (group["momentum"], group["weight_decay"], "taken_by_thinwire" in group)
    return found


def flat_state(state: Any, path: str = "") -> list[tuple[str, Tensor]]:
    if isinstance(state, Tensor):
        return [(path, state)]
    if not isinstance(state, dict):
        return []
    return [pair for k, v in state.items() for pair in flat_state(v, f"{path}/{k}")]


def test_momentum_moves_and_comes_back_with_what_it_has_gathered(pool: Pool) -> None:
    first, second = pool.run(2, moved_and_back)
    assert first["moved"] == (0.0, pytest.approx(1e-3 / (1 - 0.9)))
    assert first["buffers before"] == 0
    for figure in ("paused", "detached"):
        assert first[figure][:2] == (0.9, 1e-3)
    assert first["detached"][2] is False
    assert first["resumed"] == 0.0
    assert first["buffers"].abs().max() > 0
    assert torch.equal(first["buffers"], second["buffers"])
    assert first["left"] == 0.0 and first["momenta while paused"] == 0
    for figure in ("weights", "after"):
        assert torch.equal(first[figure], second[figure])


def paused_is_plain_momentum(rank: int, world: int, decay: float) -> tuple[Tensor, Tensor]:
    """Sent whole, tuned is SGD: so a pause in the middle changes nothing."""
    ends = []
    for pauses in (False, True):
        net = mlp(2)
        optimizer = sgd(net, weight_decay=decay)
        recipe = recipes.gtopk(density=1.0, memory=MomentumCorrected(learning_rate=True))
        whole = Tuned(saving=12, steps=STEPS, changes=(lambda part, recipe=recipe: recipe,))
        sync, model = set_up("attach", net, whole, optimizer)
        train(model, optimizer, rank, 4)
        if pauses:
            sync.pause()
        train(model, optimizer, rank, 4, start=4)
        if pauses:
            sync.resume()
        train(model, optimizer, rank, 4, start=8)
        ends.append(weights(net))
        sync.detach()
    return ends[0], ends[1]


# Scaled weight decay is what momentum makes of it once weights move slowly: nearly the same.
@pytest.mark.parametrize(("decay", "near"), [(0.0, 1e-6), (1e-2, 2e-3)])
def test_a_pause_hands_momentum_over_both_ways(pool: Pool, decay: float, near: float) -> None:
    for without, with_pause in pool.run(2, paused_is_plain_momentum, decay):
        assert torch.allclose(without, with_pause, atol=near), (without - with_pause).abs().max()


def resumed(rank: int, world: int, order: str) -> tuple[Tensor, Tensor]:
    def begin() -> tuple[Any, Any, Any, Any]:
        net = mlp(3)
        optimizer = sgd(net, weight_decay=1e-3)
        return net, optimizer, *set_up("attach", net, TUNED, optimizer)

    net, optimizer, sync, model = begin()
    train(model, optimizer, rank, 5)
    file = io.BytesIO()
    torch.save([net.state_dict(), optimizer.state_dict(), sync.state_dict()], file)
    train(model, optimizer, rank, 5, start=5)
    straight = weights(net)
    sync.detach()

    file.seek(0)
    saved = torch.load(file, weights_only=True)
    if order == "attach first":
        net, optimizer, sync, model = begin()
        optimizer.load_state_dict(saved[1])
    else:
        net = mlp(3)
        optimizer = sgd(net, weight_decay=1e-3)
        optimizer.load_state_dict(saved[1])
        sync, model = set_up("attach", net, TUNED, optimizer)
    net.load_state_dict(saved[0])
    sync.load_state_dict(saved[2])
    train(model, optimizer, rank, 5, start=5)
    sync.detach()
    assert optimizer.param_groups[0]["momentum"] == 0.9
    assert optimizer.param_groups[0]["weight_decay"] == 1e-3
    return straight, weights(net)


@pytest.mark.parametrize("order", ["attach first", "load first"])
def test_a_checkpoint_carries_what_was_moved(pool: Pool, order: str) -> None:
    for straight, after in pool.run(2, resumed, order):
        assert torch.equal(straight, after)


def others(rank: int, world: int) -> list[Any]:
    """Optimizers whose momentum stays, and a scheduler that would bring it back."""
    found: list[Any] = []
    net = mlp(2)
    half = [{"params": list(net[0].parameters()), "momentum": 0.5}, {"params": net[2].parameters()}]
    for optimizer, recipe in (
        (torch.optim.AdamW(net.parameters()), TUNED),
        (sgd(net, dampening=0.1), TUNED),
        (sgd(net), recipes.tuned(saving=12, steps=STEPS, clipped=True)),
        (torch.optim.SGD(half, lr=0.1, momentum=0.9), TUNED),
        (sgd(net, momentum=0.0), TUNED),
    ):
        sync, _ = set_up("attach", net, recipe, optimizer)
        found.append((repr(sync.recipe), optimizer.param_groups[0].get("momentum")))
        sync.detach()
    optimizer = sgd(net)
    sync, model = set_up("attach", net, TUNED, optimizer)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9, cycle_momentum=True)
    with pytest.raises(Exception, match="cycle_momentum=False"):
        train(model, optimizer, rank, 1)
    return found


def test_momentum_stays_where_it_could_not_be_moved(pool: Pool) -> None:
    for found in pool.run(2, others):
        assert [momentum for _, momentum in found] == [None, 0.9, 0.9, 0.5, 0.0]
        assert all("Momentum" not in recipe for recipe, _ in found)


def without_an_optimizer(rank: int, world: int) -> str:
    with pytest.raises(ValueError, match=r"attach\(model, recipe, optimizer\)") as error:
        thinwire.attach(ddp(mlp(2)), TUNED)
    return str(error.value)


def test_tuned_wants_to_see_the_optimizer(pool: Pool) -> None:
    pool.run(2, without_an_optimizer)


def spent(rank: int, world: int, saving: float, momentum: float) -> float:
    """Bytes of a whole training, of 60,000 parameters, as shares of what dense would send."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(200, 200), nn.Tanh(), nn.Linear(200, 100))
    optimizer = sgd(net, momentum=momentum)
    model = ddp(net, bucket_cap_mb=1.0)
    sync = thinwire.attach(model, recipes.tuned(saving=saving, steps=200), optimizer)
    for step in range(200):
        draw = torch.Generator().manual_seed(1000 * step + rank)
        model(torch.randn(8, 200, generator=draw)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    done = sync.metrics()
    sync.detach()
    return done["bytes_dense"] / done["bytes_sent"]


@pytest.mark.parametrize(
    ("saving", "momentum"), [(4, 0.9), (8, 0.9), (12, 0.9), (28, 0.9), (12, 0.0), (60, 0.0)]
)
def test_the_bytes_of_the_run_meet_the_budget(pool: Pool, saving: float, momentum: float) -> None:
    (first, *_) = pool.run(4, spent, saving, momentum)
    assert math.isclose(first, saving, rel_tol=0.05), first
