"""Memories: the papers' recurrences written out, step by step, against ours."""

from __future__ import annotations

import math

import pytest
import torch

from thinwire import Bucket, recipes
from thinwire.bucket import by_layer
from thinwire.collectives.gather import AllGather
from thinwire.combinators import Remember, dense
from thinwire.comm import local
from thinwire.memory import MomentumCorrected, Residual
from thinwire.reducers import Select
from thinwire.schedule import Flushed
from thinwire.selectors.topk import topk

SHAPE, K = (20, 30), 30


def gradient(step: int) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(step))


def top(x: torch.Tensor) -> torch.Tensor:
    """The K largest entries of x, the others zero."""
    index = x.reshape(-1).abs().topk(K).indices
    return torch.zeros(x.numel()).scatter(0, index, x.reshape(-1)[index]).view_as(x)


def run(memory, steps: int, inner=None, rates=None, world: int = 1):
    """The means of a world of one; at each step the bucket may carry learning rates."""
    inner = inner or Select(pick=topk, over=by_layer, density=K / 600)
    recipe, state, means = Remember(inner, memory), {}, []

    def worker(comm):
        for step in range(steps):
            bucket = Bucket.of({"w": gradient(step)}, state=state, step=step)
            bucket.rates = None if rates is None else {"w": rates[step]}
            means.append(recipe.reduce(bucket, comm).mean.view(SHAPE).clone())

    local.run(world, worker)
    return means, state["slots"]["w"]["memory"]


@pytest.mark.parametrize("decay", [1.0, 0.9, 0.0])
def test_residual_with_decay(decay):
    means, kept = run(Residual(decay=decay), 6)
    e = torch.zeros(SHAPE)
    for step, mean in enumerate(means):
        x = decay * e + gradient(step)
        e = x - top(x)
        assert torch.allclose(mean, top(x), atol=1e-6)
    assert torch.allclose(kept["residual"], e, atol=1e-6)


def test_decay_may_be_a_schedule():
    means, _ = run(Residual(decay=lambda step: 0.5 if step == 1 else 1.0), 2)
    x = gradient(0)
    x = 0.5 * (x - top(x)) + gradient(1)
    assert torch.allclose(means[1], top(x), atol=1e-6)


def test_the_learning_rate_inside_the_residual():
    """e holds rate x gradient; what is applied, rate x mean, is the top of e + rate x gradient."""
    rates = [0.1, 0.1, 0.01, 0.0, 0.01, 0.5]
    means, kept = run(Residual(learning_rate=True), 6, rates=rates)
    e = torch.zeros(SHAPE)
    for step, (rate, mean) in enumerate(zip(rates, means, strict=True)):
        x = e + rate * gradient(step)
        applied = top(x) if rate else torch.zeros(SHAPE)  # at rate 0 nothing moves, nothing is lost
        assert torch.allclose(rate * mean, applied, atol=1e-6)
        e = x - applied
    assert torch.allclose(kept["residual"], e, atol=1e-6)


def test_the_learning_rate_behind_momentum():
    """What is applied, rate x mean, is of the sum of rate x momentum; a flush applies all of it."""
    rates = [0.5, 0.5, 0.1, 0.01, 0.001]
    flush = Flushed(K / 600, len(rates))
    inner = Select(pick=topk, over=by_layer, density=flush)
    memory = MomentumCorrected(masking="never", learning_rate=True)
    means, kept = run(memory, len(rates), inner, rates)
    u, owed = torch.zeros(SHAPE), torch.zeros(SHAPE)
    for step, (rate, mean) in enumerate(zip(rates, means, strict=True)):
        u = 0.9 * u + gradient(step)
        owed = owed + rate * u
        last = step == len(rates) - 1
        assert torch.allclose(rate * mean, owed if last else top(owed), atol=1e-5)
        owed = owed - rate * mean
    assert not kept["residual"].any()


@pytest.mark.parametrize("rates", [{"a": 0.5, "b": 0.5}, {"a": 0.5, "b": 0.1}])
@pytest.mark.parametrize(
    "memory", [Residual(learning_rate=True), MomentumCorrected(learning_rate=True)]
)
def test_a_loss_scale_and_a_rate_inside(memory, rates):
    """Gradients times a loss scale, the mean over it, leave the same residual and apply the same,
    whatever the scale of the day: with one rate for all, and with one for each parameter."""

    def run_with(scales):
        recipe, state, applied = recipes.topk(density=0.5, memory=memory), {}, []

        def worker(comm):
            for step, scale in enumerate(scales):
                grads = {"a": torch.tensor([4.0, 1.0]), "b": torch.tensor([1.0, 4.0])}
                scaled = {name: grad * scale for name, grad in grads.items()}
                bucket = Bucket.of(scaled, state=state, step=step)
                bucket.rates, bucket.scale = rates, scale
                applied.append(recipe.reduce(bucket, comm).mean / scale)

        local.run(1, worker)
        return applied, [state["slots"][name]["memory"]["residual"] for name in "ab"]

    plain, kept = run_with([1.0, 1.0, 1.0])
    scaled, kept_scaled = run_with([1024.0, 256.0, 8.0])
    assert kept[0].any()
    for a, b in zip([*plain, *kept], [*scaled, *kept_scaled], strict=True):
        assert torch.allclose(a, b, rtol=1e-5)


def test_timely_masking_of_each_parameter_with_momentum_of_the_day():
    """u times d / (1 - m (1 - d)) where v was sent: m is this step's, d is of this parameter."""
    momenta = [0.9, 0.5, 0.0, 0.99]
    memory = MomentumCorrected(momentum=lambda step: momenta[step])
    recipe = recipes.topk(density={"a": 0.1, "b": 0.5}, memory=memory)
    state: dict = {}
    u = {name: torch.zeros(SHAPE) for name in "ab"}
    v = {name: torch.zeros(SHAPE) for name in "ab"}

    def worker(comm):
        for step, m in enumerate(momenta):
            grads = {"a": gradient(step), "b": gradient(step + 50)}
            recipe.reduce(Bucket.of(grads, state=state, step=step), comm)
            for (name, grad), share in zip(grads.items(), (0.1, 0.5), strict=True):
                u[name] = m * u[name] + grad
                v[name] = v[name] + u[name]
                sent = torch.zeros(600, dtype=torch.bool)
                sent[v[name].view(-1).abs().topk(round(600 * share)).indices] = True
                sent = sent.view(SHAPE)
                v[name] = torch.where(sent, 0.0, v[name])
                u[name] = torch.where(sent, share / (1 - m * (1 - share)) * u[name], u[name])
                kept = state["slots"][name]["memory"]
                assert torch.allclose(kept["momentum"], u[name], atol=1e-5)
                assert torch.allclose(kept["residual"], v[name], atol=1e-5)

    local.run(1, worker)


def test_rates_of_each_parameter():
    recipe = recipes.topk(density=0.5, memory=Residual(learning_rate=True))
    state: dict = {}

    def worker(comm):
        grads = {"a": torch.tensor([4.0, 1.0]), "b": torch.tensor([1.0, 4.0])}
        bucket = Bucket.of(grads, state=state, step=0)
        bucket.rates = {"a": 0.5, "b": 0.1}
        return recipe.reduce(bucket, comm).mean

    assert local.run(1, worker)[0].tolist() == pytest.approx([4.0, 0.0, 0.0, 4.0])
    kept = [state["slots"][name]["memory"]["residual"].tolist() for name in "ab"]
    assert kept == [pytest.approx([0.0, 0.5]), pytest.approx([0.1, 0.0])]


@pytest.mark.parametrize("masking", ["timely", "always", "never"])
@pytest.mark.parametrize("nesterov", [False, True])
def test_dgcs_recurrence(nesterov, masking):
    """u = m u + g, v += u; nesterov u = m (u + g), v += u + g; where v was sent it is cleared, and
    u is what `masking` says."""
    memory = MomentumCorrected(momentum=0.9, nesterov=nesterov, masking=masking)
    means, kept = run(memory, 8)
    u, v = torch.zeros(SHAPE), torch.zeros(SHAPE)
    for step, mean in enumerate(means):
        g = gradient(step)
        u = 0.9 * (u + g) if nesterov else 0.9 * u + g
        v = v + (u + g if nesterov else u)
        sent = top(v)
        assert torch.allclose(mean, sent, atol=1e-5)
        v = v - sent
        share = float((sent != 0).float().mean())
        left = {"timely": share / (1 - 0.9 * (1 - share)), "always": 0.0, "never": 1.0}[masking]
        u = torch.where(sent == 0, u, left * u)
    assert torch.allclose(kept["residual"], v, atol=1e-5)
    assert torch.allclose(kept["momentum"], u, atol=1e-5)


def test_a_dense_share_is_ordinary_momentum():
    """In a warm-up v is sent whole and u is left alone: the mean is SGD's momentum buffer."""
    means, kept = run(MomentumCorrected(momentum=0.9), 5, inner=dense())
    u = torch.zeros(SHAPE)
    for step, mean in enumerate(means):
        u = 0.9 * u + gradient(step)
        assert torch.allclose(mean, u, atol=1e-6)
    assert not kept["residual"].any()


@pytest.mark.parametrize("masking", ["timely", "always"])
def test_a_parameter_sent_whole_has_ordinary_momentum_too(masking):
    """Nothing of it is late, so nothing is cleared; its sparse neighbours are, where sent."""
    memory = MomentumCorrected(momentum=0.9, masking=masking)
    recipe, state = recipes.topk(density={"bias": 1.0, "": 0.1}, memory=memory), {}
    means = []

    def worker(comm):
        for step in range(4):
            grads = {"w": gradient(step), "bias": gradient(step)[0], "z": gradient(step)}
            mean = recipe.reduce(Bucket.of(grads, state=state, step=step), comm).mean
            means.append(mean[600:630].clone())

    local.run(1, worker)
    u = torch.zeros(30)
    for step, mean in enumerate(means):
        u = 0.9 * u + gradient(step)[0]
        assert torch.allclose(mean, u, atol=1e-6)
    assert not state["slots"]["bias"]["memory"]["residual"].any()
    for name in ("w", "z"):
        cleared = int((state["slots"][name]["memory"]["momentum"] == 0).sum())
        assert cleared == (60 if masking == "always" else 0)


@pytest.mark.parametrize("masking", ["timely", "always"])
@pytest.mark.parametrize("collective", [AllGather(ragged=True), "topkdsa", "cheapest"])
def test_zeros_in_a_parameter_sent_whole_cost_it_no_momentum(collective, masking):
    """Two of three units are dead. The mean of the third reaches 1 + 0.9 + ... + 0.9^14 = 7.94 as
    in the authors' code; it stayed at 1 while zeros, which need not travel, did not count as sent.
    """
    memory = MomentumCorrected(momentum=0.9, masking=masking)
    recipe = recipes.topk(density={"bias": 1.0, "": 0.1}, collective=collective, memory=memory)

    def worker(comm):
        state: dict = {}
        for step in range(15):
            grads = {"w": gradient(step), "bias": torch.tensor([0.0, 1.0, 0.0])}
            reduced = recipe.reduce(Bucket.of(grads, state=state, step=step), comm)
        assert reduced.entries == 60 + 1, "zeros are not reported as sent"
        return reduced.mean[600:]

    for mean in local.run(2, worker):
        assert mean.tolist() == pytest.approx([0.0, 7.941, 0.0], abs=1e-3)


@pytest.mark.parametrize("masking", ["timely", "always"])
@pytest.mark.parametrize("collective", [AllGather(ragged=True), "topkdsa", "cheapest"])
def test_what_rounding_made_zero_was_sent_all_the_same(collective, masking):
    """Beside 1.0 in a block of eight bits 1e-4 is rounded to zero, in every step."""
    recipe = recipes.topk(
        density={"bias": 1.0, "": 0.1}, collective=collective, wire="int8",
        memory=MomentumCorrected(momentum=0.9, masking=masking),
    )  # fmt: skip

    def worker(comm):
        state: dict = {}
        for step in range(15):
            grads = {"w": gradient(step), "bias": torch.tensor([1.0, 1e-4, 1e-4, 1e-4])}
            reduced = recipe.reduce(Bucket.of(grads, state=state, step=step), comm)
        return reduced.mean[600:]

    for mean in local.run(2, worker):
        assert float(mean[0]) == pytest.approx(7.94, abs=0.1)


@pytest.mark.parametrize("masking", ["timely", "always"])
def test_zeros_that_were_chosen_count_in_the_share(masking):
    """Half of a parameter is asked for, a tenth is not zero: the share that was sent is a half."""
    recipe = recipes.topk(
        density=0.5, collective=AllGather(ragged=True), memory=MomentumCorrected(masking=masking)
    )
    state: dict = {}

    def worker(comm):
        grads = {"w": torch.cat([torch.ones(10), torch.zeros(90)])}
        return recipe.reduce(Bucket.of(grads, state=state, step=0), comm).entries

    assert local.run(1, worker) == [10]
    left = {"timely": 0.5 / (1 - 0.9 * (1 - 0.5)), "always": 0.0}[masking]
    momentum = state["slots"]["w"]["memory"]["momentum"]
    assert torch.allclose(momentum[:10], torch.tensor(left))


@pytest.mark.parametrize("world", [1, 4])
def test_local_clipping_by_the_root_of_the_workers(world):
    recipe = Remember(dense(), MomentumCorrected(momentum=0.0, clip=1.0))

    def worker(comm):
        bucket = Bucket.of({"a": torch.full((100,), 3.0), "b": torch.full((4,), 0.01)}, state={})
        return recipe.reduce(bucket, comm).mean

    mean = local.run(world, worker)[0]
    assert float(mean[:100].norm()) == pytest.approx(1 / math.sqrt(world), rel=1e-5)
    assert torch.allclose(mean[100:], torch.tensor(0.01)), "below the limit nothing changes"


def test_loss_scale_is_taken_out_first():
    recipe, state = Remember(dense(), MomentumCorrected(momentum=0.5)), {}

    def worker(comm):
        for step, scale in enumerate((1024.0, 256.0)):
            bucket = Bucket.of({"w": scale * torch.ones(4)}, state=state, step=step)
            bucket.scale = scale
            mean = recipe.reduce(bucket, comm).mean / scale
        return mean

    assert local.run(1, worker)[0].tolist() == [1.5] * 4


@pytest.mark.parametrize("memory", [Residual(), MomentumCorrected()])
def test_undo_puts_everything_back(memory):
    """What the engine does when another bucket of the step was broken: sent = 0, u unmasked."""
    recipe, state = Remember(Select(pick=topk, density=0.05), memory), {}

    def worker(comm):
        bucket = Bucket.of({"w": gradient(0)}, state=state, step=0)
        reduced = recipe.reduce(bucket, comm)
        reduced.undo()

    local.run(1, worker)
    for kept in state["slots"]["w"]["memory"].values():
        assert torch.allclose(kept, gradient(0), atol=1e-6)


def test_momentum_needs_a_sender_that_keeps():
    class OwnerKeeps(AllGather):
        keeps = "owner"

    select = Select(pick=topk, density=0.1, collective=OwnerKeeps())
    with pytest.raises(ValueError, match=r"sender keeps.*use AllGather\(\)"):
        Remember(select, MomentumCorrected())
    Remember(select, Residual())


@pytest.mark.parametrize(("make", "message"), [
    (lambda: Residual(decay=1.5), r"decay must be in \[0, 1\], got 1.5"),
    (lambda: MomentumCorrected(momentum=-0.1), r"momentum must be in \[0, 1\]"),
    (lambda: MomentumCorrected(clip=0.0), "clip must be a norm above 0"),
    (lambda: MomentumCorrected(masking=True), "masking is one of timely, always, never, got True"),
])  # fmt: skip
def test_bad_settings(make, message):
    with pytest.raises(ValueError, match=message):
        make()


SPARSE = ["randomk", "topk", "threshold", "dgc", "gaussiank", "redsync", "sidco", "adtopk",
          "demo_dct"]  # fmt: skip


@pytest.mark.parametrize("name", SPARSE)
@pytest.mark.parametrize("memory", ["none", "residual", "momentum", Residual(decay=0.5),
                                    MomentumCorrected(nesterov=True, clip=5.0)])  # fmt: skip
def test_every_sparse_recipe_takes_every_memory(name, memory):
    recipe = getattr(recipes, name)(density=0.1, memory=memory)

    def worker(comm):
        state: dict = {}
        for step in range(3):
            grads = {"w": gradient(step + 10 * comm.rank)}
            reduced = recipe.reduce(Bucket.of(grads, state=state, step=step), comm)
        return reduced.mean, reduced.sent.add_into(torch.zeros(600))

    results = local.run(2, worker)
    assert torch.allclose(results[0][0], sum(sent for _, sent in results) / 2, atol=1e-5)


def test_what_is_left_of_momentum_does_not_hang_on_the_order_of_entries():
    grads = {"a": torch.zeros(7), "none": torch.zeros(0), "b": torch.zeros(3, 4)}
    bucket = Bucket.of(grads, state={})
    index = torch.tensor([0, 3, 4, 7, 8, 18])
    order = torch.tensor([5, 0, 3, 1, 4, 2])
    for masking in ("timely", "always"):
        memory = MomentumCorrected(masking=masking)
        left = memory._left(index, bucket)
        assert torch.equal(memory._left(index[order], bucket), left[order])
    share = 3 / 7
    assert MomentumCorrected()._left(index, bucket)[0] == pytest.approx(
        share / (1 - 0.9 * (1 - share))
    )
