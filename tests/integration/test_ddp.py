"""`attach` in real gloo processes, with everything DDP users do to a training loop."""

from __future__ import annotations

import io
import logging
import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from tests.integration.common import KINDS, WIDTH, batch, ddp, mlp, sgd, train, weights
from tests.processes import Pool
from thinwire import recipes

pytestmark = pytest.mark.slow


def same_everywhere(results: list[Tensor]) -> Tensor:
    assert all(torch.equal(r, results[0]) for r in results), "replicas differ"
    assert results[0].isfinite().all()
    return results[0]


# dense is DDP, bit for bit -----------------------------------------------------------------


def dense_and_plain(rank: int, world: int, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    results = []
    for attached in (False, True):
        net = mlp()
        model = ddp(net, **options)
        optimizer = sgd(net)
        if attached:
            thinwire.attach(model, recipes.dense(), optimizer=optimizer)
        train(model, optimizer, rank, 20)
        results.append(weights(net))
    return results[0], results[1]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_dense_is_plain_ddp_bit_for_bit(pool: Pool, world: int) -> None:
    for plain, ours in pool.run(world, dense_and_plain, {}):
        assert torch.equal(plain, ours)


def test_dense_is_plain_ddp_at_three(pool: Pool) -> None:
    for plain, ours in pool.run(3, dense_and_plain, {}):
        assert (plain - ours).abs().max() <= 1e-6


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_as_bucket_view": True},
        {"static_graph": True},
        {"find_unused_parameters": True},
        {"static_graph": True, "gradient_as_bucket_view": True},
    ],
    ids=lambda options: "+".join(options),
)
@pytest.mark.parametrize("world", [2, 4])
def test_dense_under_ddp_options(pool: Pool, world: int, options: dict[str, Any]) -> None:
    for plain, ours in pool.run(world, dense_and_plain, options):
        assert torch.equal(plain, ours)


# every recipe under every option -------------------------------------------------------------


def every_recipe(rank: int, world: int, options: dict[str, Any]) -> list[Tensor]:
    results = []
    for name in KINDS if options else recipes.names():
        net, recipe = mlp(), getattr(recipes, name)()
        model, optimizer = ddp(net, **options), sgd(net, recipe)
        sync = thinwire.attach(model, recipe, optimizer=optimizer)
        train(model, optimizer, rank, 6)
        metrics = sync.metrics()
        assert metrics["steps"] == 6
        assert metrics["skipped_steps"] == 0
        assert metrics["bytes_sent"] <= metrics["bytes_dense"] + 6 * 8 * 8 * len(
            list(net.parameters())
        )
        sync.detach()
        results.append(weights(net))
    return results


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_as_bucket_view": True},
        {"static_graph": True},
        {"find_unused_parameters": True},
    ],
    ids=lambda options: "+".join(options) or "default",
)
def test_every_recipe_trains_under(pool: Pool, options: dict[str, Any]) -> None:
    for results in zip(*pool.run(3, every_recipe, options), strict=True):
        same_everywhere(list(results))


def test_every_recipe_trains_alone(pool: Pool) -> None:
    pool.run(1, every_recipe, {})


# what happens to a training loop ----------------------------------------------------------


def accumulated(rank: int, world: int) -> tuple[Tensor, Tensor, int]:
    """Three micro-batches under no_sync, or one batch three times as large."""
    results, steps = [], 0
    for micro in (True, False):
        net = mlp()
        model = ddp(net)
        sync = thinwire.attach(model, recipes.topk(density=0.1))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(5):
            parts = [batch(rank, 10 * step + i) for i in range(3)]
            if micro:
                with model.no_sync():
                    for part in parts[:2]:
                        (model(part).pow(2).mean() / 3).backward()
                (model(parts[2]).pow(2).mean() / 3).backward()
            else:
                model(torch.cat(parts)).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        steps = sync.metrics()["steps"]
        results.append(weights(net))
    return results[0], results[1], steps


def test_gradient_accumulation(pool: Pool) -> None:
    for micro, whole, steps in pool.run(2, accumulated):
        assert torch.allclose(micro, whole, atol=1e-5)
        assert steps == 5


def accumulated_static(rank: int, world: int) -> tuple[str, Tensor, Tensor]:
    """PyTorch 2.13 fails an internal assert if a static graph accumulates in its first step."""
    said, results = "", []
    for attached in (False, True):
        net = mlp(3)
        model = ddp(net, static_graph=True)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        if attached:
            sync = thinwire.attach(model, recipes.dense())
            try:
                sync.no_sync()
            except ValueError as error:
                said = str(error)
        for step in range(5):
            if step > 0:
                with sync.no_sync() if attached else model.no_sync():
                    model(batch(rank, 10 + step)).pow(2).mean().backward()
            model(batch(rank, step)).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(weights(net))
    return said, results[0], results[1]


def test_gradient_accumulation_with_a_static_graph(pool: Pool) -> None:
    for said, plain, ours in pool.run(2, accumulated_static):
        assert "take one step without no_sync() first" in said
        assert torch.equal(plain, ours)


class Branches(nn.Module):
    """`left` on even ranks, `right` on odd ones, `never` on none."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Linear(WIDTH, WIDTH)
        self.left, self.right, self.never = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, side: int) -> Tensor:
        return (self.right if side % 2 else self.left)(self.trunk(x))


def unused_parameters(rank: int, world: int, name: str) -> Any:
    net = Branches()
    model = DDP(net, find_unused_parameters=True)
    sync = thinwire.attach(model, getattr(recipes, name)())
    optimizer = sgd(net)
    for step in range(4):
        both_left = step >= 2  # from here on nobody uses `right` either
        model(batch(rank, step), 0 if both_left else rank).pow(2).mean().backward()
        if both_left:
            slot = sync.state_dict()["slots"].get("right.weight", {})
            residual = slot.get("memory", {}).get("residual")
            kept = None if residual is None else residual.clone()
            if step == 2:
                held = kept
            elif kept is not None:
                assert torch.equal(kept, held), "nothing may be counted as sent for an unused slot"
        optimizer.step()
        optimizer.zero_grad()
    assert net.never.weight.grad is None
    return weights(net), all(p.grad is None for p in net.never.parameters())


@pytest.mark.parametrize("name", ["dense", "topk", "adtopk", "acpsgd", "half"])
def test_unused_parameters(pool: Pool, name: str) -> None:
    results = pool.run(2, unused_parameters, name)
    same_everywhere([w for w, _ in results])
    assert all(never for _, never in results)


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 3), nn.Flatten()
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def channels_last(rank: int, world: int, name: str) -> list[Tensor]:
    """The same training in both memory formats gives the same weights."""
    results = []
    for memory_format in (torch.contiguous_format, torch.channels_last):
        net = Convolutional().to(memory_format=memory_format)
        model = DDP(net)
        thinwire.attach(model, getattr(recipes, name)())
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        for step in range(4):
            images = batch(rank, step, 2, 3, 8, 8).to(memory_format=memory_format)
            model(images).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(torch.cat([p.detach().contiguous().reshape(-1) for p in net.parameters()]))
    return results


@pytest.mark.parametrize("name", ["dense", "topk", "adtopk"])
def test_channels_last(pool: Pool, name: str) -> None:
    for contiguous, last in pool.run(2, channels_last, name):
        assert torch.allclose(contiguous, last, atol=1e-4)


def mixed_precision(rank: int, world: int, name: str) -> Any:
    """autocast + GradScaler, with a scale that overflows at first and is doubled on the way."""
    net = mlp()
    model, optimizer = ddp(net), sgd(net)
    scaler = torch.amp.GradScaler(
        "cpu", init_scale=2.0**127, growth_interval=3, backoff_factor=2.0**-40
    )
    sync = thinwire.attach(model, getattr(recipes, name)(), optimizer=optimizer, scaler=scaler)
    skipped = 0
    for step in range(12):
        before = weights(net)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(batch(rank, step)).float().pow(2).mean() * 1e3
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        skipped += bool(torch.equal(before, weights(net)))
        for slot in sync.state_dict()["slots"].values():
            for part in slot.values():
                assert all(torch.as_tensor(v).isfinite().all() for v in part.values())
    return weights(net), skipped, sync.metrics()["skipped_steps"], scaler.get_scale()


@pytest.mark.parametrize(
    "name", ["dense", "topk", "adtopk", "powersgd", "acpsgd", "randomk", "half"]
)
def test_grad_scaler(pool: Pool, name: str) -> None:
    results = pool.run(2, mixed_precision, name)
    same_everywhere([r[0] for r in results])
    for _, skipped, reported, scale in results:
        assert skipped == reported >= 1
        assert scale < 2.0**127


def one_scale_or_another(rank: int, world: int) -> list[Tensor]:
    """The loss scale must not matter, also when it changes while residuals are held."""
    results = []
    for scales in ([1.0] * 6, [1024.0, 1024.0, 2048.0, 512.0, 512.0, 4096.0]):
        net = mlp()
        model, optimizer = ddp(net), sgd(net)
        scaler = torch.amp.GradScaler("cpu", init_scale=scales[0], growth_interval=10**6)
        thinwire.attach(model, recipes.topk(density=0.05), scaler=scaler)
        for step, scale in enumerate(scales):
            scaler.scale(model(batch(rank, step)).pow(2).mean()).backward()
            scaler.step(optimizer)
            scaler.update(scales[step + 1] if step + 1 < len(scales) else scale)
            optimizer.zero_grad()
        results.append(weights(net))
    return results


def test_residuals_follow_the_loss_scale(pool: Pool) -> None:
    for plain, scaled in pool.run(2, one_scale_or_another):
        assert torch.allclose(plain, scaled, atol=1e-6)


def uneven_inputs(rank: int, world: int, name: str) -> tuple[Tensor, int, Tensor]:
    results = []
    for attached in (False, True):
        net, recipe = mlp(), getattr(recipes, name)()
        model, optimizer = ddp(net), sgd(net, recipe)
        if attached:
            sync = thinwire.attach(model, recipe, optimizer=optimizer)
        with sync.join() if attached else model.join():
            train(model, optimizer, rank, 3 + 2 * rank)
        results.append(weights(net))
    return results[1], sync.metrics()["steps"], results[0]


@pytest.mark.parametrize("name", KINDS)
def test_join_with_uneven_inputs(pool: Pool, name: str) -> None:
    results = pool.run(3, uneven_inputs, name)
    assert {steps for _, steps, _ in results} == {7}
    same_everywhere([w for w, _, _ in results])
    for ours, _, plain in results:
        if name == "dense":
            assert torch.allclose(ours, plain, atol=1e-6)
        else:
            assert not torch.equal(ours, plain)


class Normed(nn.Module):
    """Buffers of three widths, as many as BatchNorm has and one of our own."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(mlp(), nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(WIDTH))
        self.register_buffer("odd", torch.zeros(3, dtype=torch.bool))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def buffers_after(rank: int, world: int, joined: bool, copied: bool) -> list[list[Tensor]]:
    found = []
    for attached in (False, True):
        net = Normed()
        model = ddp(net)
        if attached:
            sync = thinwire.attach(model, recipes.dense())
        if copied:
            file = io.BytesIO()
            torch.save(model, file)
            file.seek(0)
            model = torch.load(file, weights_only=False)
            net = model.module
        net.odd.fill_(rank == 0)
        optimizer = sgd(net)
        with (sync if attached and not copied else model).join() if joined else nullcontext():
            seen = []
            for step in range(3 + rank * joined):
                train(model, optimizer, rank, 1, start=step)
                seen += [buffer.clone() for buffer in net.buffers()]
        found.append([*seen, *(buffer.clone() for buffer in net.buffers())])
        if attached and not joined and not copied:
            sync.detach()
            model.train()(batch(rank, 9))  # as DDP does, once more
            assert "_distributed_broadcast_coalesced" not in model.__dict__
    return found


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("copied", [False, True])
def test_buffers_are_what_ddp_would_make_of_them(pool: Pool, joined: bool, copied: bool) -> None:
    for plain, ours in pool.run(3, buffers_after, joined, copied):
        assert len(plain) == len(ours) >= 4 * 7 and all(map(torch.equal, plain, ours))
        assert ours[-1].all(), "rank 0's"


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(50, WIDTH, sparse=True)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.table(tokens))


def scaled_embedding(rank: int, world: int, first: bool) -> list[Tensor]:
    """A sparse bucket may be the first or the last of a step: the loss scale must not matter."""
    results = []
    for scales in ([1.0] * 5, [1024.0, 512.0, 2048.0, 2048.0, 256.0]):
        net = Embedded()
        if first:  # buckets come in reverse order of registration
            net._modules = dict(reversed(net._modules.items()))
        model = DDP(net, bucket_cap_mb=0.001)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=scales[0], growth_interval=10**6)
        sync = thinwire.attach(model, recipes.topk(density=0.05), scaler=scaler)
        for step, _ in enumerate(scales):
            draw = torch.Generator().manual_seed(10 * step + rank)
            scaler.scale(model(torch.randint(50, (6,), generator=draw)).pow(2).mean()).backward()
            scaler.step(optimizer)
            scaler.update(scales[min(step + 1, 4)])
            optimizer.zero_grad()
        assert sync.metrics()["bytes_sent"] > 0
        results.append(weights(net))
    return results


@pytest.mark.parametrize("first", [True, False])
def test_sparse_embedding_under_a_changing_loss_scale(pool: Pool, first: bool) -> None:
    for plain, scaled in pool.run(2, scaled_embedding, first):
        assert torch.allclose(plain, scaled, atol=1e-6)


def sparse_embedding(rank: int, world: int, mode: str) -> tuple[Tensor, Tensor, list[str]]:
    results, told = [], []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.append(record.getMessage())

    logging.getLogger("thinwire").addHandler(Keep())
    for plain in (True, False):
        net = Embedded()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        model: nn.Module = net if mode == "distribute" and not plain else DDP(net)
        if mode == "attach" and not plain:
            thinwire.attach(model, recipes.dense())
        elif not plain:
            thinwire.distribute(optimizer, net.named_parameters(), recipes.dense())
        for step in range(4):
            draw = torch.Generator().manual_seed(10 * step + rank)
            model(torch.randint(50, (6,), generator=draw)).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(weights(net))
    return results[0], results[1], told


@pytest.mark.parametrize("mode", ["attach", "distribute"])
def test_sparse_embedding_gradients_pass_through_and_are_said_to(pool: Pool, mode: str) -> None:
    for plain, ours, told in pool.run(2, sparse_embedding, mode):
        assert torch.allclose(plain, ours, atol=1e-7)
        assert told == ["table.weight: sparse gradient, passed through uncompressed"]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encode, self.decode = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.decode.weight = self.encode.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(x).tanh())


def tied_and_grouped(rank: int, world: int) -> tuple[Tensor, list[str]]:
    net = Tied()
    model = DDP(net)
    optimizer = torch.optim.SGD(
        [
            {"params": [net.encode.weight], "lr": 0.1},
            {"params": [net.encode.bias, net.decode.bias]},
        ],
        lr=0.01,
    )
    sync = thinwire.attach(model, recipes.adtopk(density=0.1), optimizer=optimizer)
    train(model, optimizer, rank, 5)
    return weights(net), sorted(sync.state_dict()["slots"])


def test_tied_parameters_and_param_groups(pool: Pool) -> None:
    results = pool.run(2, tied_and_grouped)
    same_everywhere([w for w, _ in results])
    assert results[0][1] == ["decode.bias", "encode.bias", "encode.weight"]


def low_precision_model(rank: int, world: int) -> list[Tensor]:
    results = []
    for name in recipes.names():
        net = mlp(3).to(torch.bfloat16)
        model = ddp(net)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        thinwire.attach(model, getattr(recipes, name)(), optimizer=optimizer)
        for step in range(4):
            model(batch(rank, step).bfloat16()).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(weights(net))
    return results


def test_bfloat16_parameters(pool: Pool) -> None:
    for results in zip(*pool.run(2, low_precision_model), strict=True):
        same_everywhere(list(results))


# coming and going ----------------------------------------------------------------------------


def resumed(
    rank: int, world: int, name: str, options: dict[str, Any], stops: list[int], scale: float = 0.0
) -> list[int]:
    """Six steps at a stretch; or a checkpoint, everything built anew, and the rest: the steps after
    which it was saved and did not go on with the same bits."""
    recipe, saved = getattr(recipes, name)(), {}

    def run(start: int, state: dict[str, Any] | None) -> Tensor:
        net = mlp(3)
        model, optimizer = ddp(net, **options), sgd(net, recipe)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=bool(scale))
        if state is not None:
            net.load_state_dict(state["net"])
            optimizer.load_state_dict(state["opt"])
            scaler.load_state_dict(state["scaler"])
        sync = thinwire.attach(model, recipe, optimizer=optimizer, scaler=scaler)
        if state is not None:
            sync.load_state_dict(state["sync"])
        for step in range(start, 6):
            scaler.scale(model(batch(rank, step)).pow(2).mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            file = io.BytesIO()
            parts = {"net": net, "opt": optimizer, "scaler": scaler, "sync": sync}
            torch.save({part: has.state_dict() for part, has in parts.items()}, file)
            if state is None:
                saved[step + 1] = file
        sync.detach()
        return weights(net)

    straight, different = run(0, None), []
    for stop in stops:
        saved[stop].seek(0)
        if not torch.equal(straight, run(stop, torch.load(saved[stop], weights_only=True))):
            different.append(stop)
    return different


def all_resumed(rank: int, world: int, names: list[str], *case: Any) -> dict[str, list[int]]:
    runs = {name: resumed(rank, world, name, *case) for name in names}
    return {name: stops for name, stops in runs.items() if stops}


@pytest.mark.parametrize("half", [0, 1])
def test_resume_is_bit_exact_from_any_step_on(pool: Pool, half: int) -> None:
    """Every recipe. DDP comes with other buckets from the second step on."""
    names = recipes.names()[half::2]
    assert pool.run(2, all_resumed, names, {}, [1, 3], timeout=110) == [{}, {}]


@pytest.mark.parametrize(
    ("options", "stops"),
    [({"static_graph": True}, [1, 2, 4]),
     ({"find_unused_parameters": True}, [1]),
     ({"gradient_as_bucket_view": True, "bucket_cap_mb": None}, [1, 2])],
    ids=["static", "unused", "default"],
)  # fmt: skip
def test_resume_is_bit_exact_under(pool: Pool, options: dict[str, Any], stops: list[int]) -> None:
    """One recipe of every kind, three workers."""
    assert pool.run(3, all_resumed, KINDS, options, stops, timeout=110) == [{}, {}, {}]


def test_resume_is_bit_exact_after_steps_that_were_skipped(pool: Pool) -> None:
    """DDP makes its buckets anew after a step that the loss scale made void, too."""
    names = ["half", "topk", "gtopk"]
    assert pool.run(2, all_resumed, names, {}, [1, 2, 3], 2.0**127) == [{}, {}]


class Crossed(nn.Module):
    """Used in another order than it was registered in, its last layer perhaps in bfloat16."""

    def __init__(self, low: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.c, self.b = (nn.Linear(300, 300) for _ in range(3))
        self.low = nn.Linear(300, 300).to(low)

    def forward(self, x: Tensor) -> Tensor:
        return self.low(self.c(self.b(self.a(x))).to(self.low.weight.dtype)).float()


def foretold(rank: int, world: int, options: dict[str, Any]) -> list[Any]:
    """The buckets that the state after each step says the next one will have, and all later."""
    low = torch.float32 if "static_graph" in options else torch.bfloat16
    model = DDP(Crossed(low), **options)
    sync = thinwire.attach(model, recipes.dense())
    said = []
    for step in range(4):
        model(batch(rank, step, 4, 300)).pow(2).mean().backward()
        said.append(sync.state_dict())
    sync.detach()
    return [(state["next"], state["buckets"]) for state in said]


@pytest.mark.parametrize(
    "options",
    [{}, {"bucket_cap_mb": 0.5}, {"static_graph": True}, {"find_unused_parameters": True},
     {"bucket_cap_mb": 0.3, "static_graph": True}],
    ids=str,
)  # fmt: skip
def test_a_state_says_how_ddp_will_cut_its_buckets(pool: Pool, options: dict[str, Any]) -> None:
    for said in pool.run(2, foretold, options):
        settled = said[-1]
        assert settled[0] == settled[1] and len(settled[0]) > 1
        assert all(buckets == settled[1] for _, buckets in said)
        assert said[1][0] == settled[0]
        static = "static_graph" in options
        assert (said[0][0] == settled[0]) != static


def paused(rank: int, world: int) -> Any:
    net = mlp()
    model, optimizer = ddp(net), torch.optim.SGD(net.parameters(), lr=0.1)
    sync = thinwire.attach(model, recipes.topk(density=0.05))
    train(model, optimizer, rank, 3)
    held = sum(s["memory"]["residual"].abs().sum() for s in sync.state_dict()["slots"].values())
    sync.pause()
    train(model, optimizer, rank, 1, start=3)
    delivered = sum(
        s["memory"]["residual"].abs().sum() for s in sync.state_dict()["slots"].values()
    )
    sync.resume()
    train(model, optimizer, rank, 2, start=4)
    after = sum(s["memory"]["residual"].abs().sum() for s in sync.state_dict()["slots"].values())
    steps = sync.metrics()["steps"]
    sync.detach()
    train(model, optimizer, rank, 2, start=6)
    assert sync.metrics()["steps"] == steps, "a detached sync takes no steps"
    with pytest.raises(RuntimeError, match="detached"):
        sync.synchronize()
    other = thinwire.attach(model, recipes.acpsgd(rank=1))
    train(model, optimizer, rank, 2, start=8)
    return (
        weights(net),
        float(held),
        float(delivered),
        float(after),
        steps,
        other.metrics()["steps"],
    )


def test_pause_resume_detach_attach_again(pool: Pool) -> None:
    results = pool.run(2, paused)
    same_everywhere([r[0] for r in results])
    for _, held, delivered, after, steps, others in results:
        assert held > 0
        assert delivered == 0
        assert after > 0
        assert (steps, others) == (6, 2)


def compiled(rank: int, world: int) -> list[Tensor]:
    results = []
    for compile_it in (False, True):
        net = mlp(3)
        model: nn.Module = DDP(net)
        thinwire.attach(model, recipes.topk(density=0.05))
        if compile_it:
            model = torch.compile(model, backend="aot_eager")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            train(model, sgd(net), rank, 4)
        results.append(weights(net))
    return results


def test_torch_compile(pool: Pool) -> None:
    for eager, traced in pool.run(2, compiled):
        assert torch.allclose(eager, traced, atol=1e-6)
