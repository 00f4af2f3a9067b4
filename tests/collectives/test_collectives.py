"""Every collective, in worlds of 1 to 9 and 16: the law, whatever ranks bring, on the path meant.

Small buckets tempt hybrids to go dense, so each case says which phases it must have gone through.
"""

from __future__ import annotations

import pytest
import torch

from tests.collectives.worlds import INPUTS, WORLDS, K, N, check_law, phases, private, reduce
from thinwire import Bucket, recipes
from thinwire.bucket import whole
from thinwire.collectives.cheapest import Cheapest
from thinwire.collectives.gather import AllGather
from thinwire.collectives.gtopk import GTopK
from thinwire.collectives.oktopk import OkTopk
from thinwire.collectives.slots import Slots
from thinwire.collectives.spardl import BlockQuota, hops
from thinwire.collectives.split import SplitReduce
from thinwire.combinators import Remember
from thinwire.comm import local
from thinwire.payload import find_chosen
from thinwire.recipes.options import COLLECTIVES as COLLECTIVE_NAMES
from thinwire.reducers import Select
from thinwire.selectors.estimators import Constant
from thinwire.selectors.threshold import Threshold
from thinwire.selectors.topk import topk
from thinwire.wire import wire

EXACT = {"AllGather": AllGather(), "GTopK": GTopK()}
RAGGED = {
    "AllGather, ragged": AllGather(ragged=True),
    "GTopK, ragged": GTopK(ragged=True),
    "GTopK, tree": GTopK(ragged=True, tree=True),
    "SplitReduce": SplitReduce(),
    "SplitReduce, pairwise": SplitReduce(form="pairwise"),
    "OkTopk": OkTopk(refresh=3, balance_every=2),
    "OkTopk, all to all": OkTopk(form="all_to_all", spread_above=1.0),
    "Slots": Slots(every=2),
    "Slots, pairwise": Slots(form="pairwise"),
    "BlockQuota": BlockQuota(),
    "Cheapest": Cheapest(),
    "Cheapest, split": Cheapest(sparse=SplitReduce(), by="fill"),
}
COLLECTIVES = EXACT | RAGGED


def recipe(collective, density=0.05, pick=topk, coded="fp32"):
    select = Select(pick=pick, over=whole, density=density, collective=collective, wire=wire(coded))
    return Remember(select)


def path(name, world):
    """The phases of an ordinary step of rank 0 (step 1 of a run)."""
    pairs = max(1, world - 1)
    turns = pairs if "pairwise" in name or name == "OkTopk" else 1
    if world == 1 and ("pairwise" in name or name == "OkTopk"):
        turns = 0
    if name.startswith("AllGather") or name == "Cheapest":
        return ["gather"]
    if name.startswith("Slots"):
        return ["split"] * turns + ["gather"] * turns
    if name == "BlockQuota":
        return [f"hop {hop}" for hop, _ in hops(world)] + ["gather"]
    if "OkTopk" in name or "Split" in name or "split" in name:
        return ["split"] * turns + ["count"] * turns + ["gather"] * turns
    return None


@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", COLLECTIVES)
def test_nothing_is_lost_in_any_world(name, world, kind):
    density = 0.05 if world < 16 else 0.02  # sixteen ranks of 5 % fill up half the bucket
    results = reduce(recipe(COLLECTIVES[name], density), world, INPUTS[kind], steps=3)
    check_law(results, world)
    wanted = path(name, world)
    if wanted is not None and "spread" not in phases(results, 1):
        assert phases(results, 1) == wanted


@pytest.mark.parametrize("coded", ["bf16+auto", "int8+rice", "fp16+u16", "fp8+bitmap", "fp32+auto"])
@pytest.mark.parametrize("world", [1, 3, 4])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_on_every_wire(name, world, coded):
    """What the wire rounds off is somebody's to keep."""
    results = reduce(recipe(COLLECTIVES[name], coded=coded), world, private, steps=3)
    check_law(results, world)


@pytest.mark.parametrize("world", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("name", RAGGED)
def test_ranks_that_select_nothing(name, world):
    """Only odd ranks have anything above the threshold; then nobody has."""
    pick = Threshold(estimate=Constant(0.5), correct=None, capacity=1.0)
    for make in (lambda r, s: private(r, s) * (r % 2), lambda r, s: torch.zeros(N)):
        results = reduce(recipe(COLLECTIVES[name], pick=pick), world, make, steps=3)
        check_law(results, world)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("world", [2, 3, 8])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_bad_ranks_are_heard_by_all(name, world, bad):
    """A NaN ends the step on every rank, on one or on all of them; the next step goes on."""

    def make(rank, step):
        x = private(rank, step)
        if step == 3 or (step == 1 and rank == world - 1):
            x[7 + rank] = bad
        return x

    results = reduce(recipe(COLLECTIVES[name]), world, make, steps=5)
    for broken in (1, 3):
        assert all(not rank[broken][0].isfinite().all() for rank in results)
        assert all(float(rank[broken][1].abs().sum()) == 0.0 for rank in results)
    assert all(rank[step][0].isfinite().all() for rank in results for step in (2, 4))
    check_law([[rank[0], rank[2], rank[4]] for rank in results], world)


@pytest.mark.parametrize("memory", ["residual", "none"])
@pytest.mark.parametrize("name", ["spardl", "slots", "topk", "gtopk", "topkdsa"])
def test_a_bad_rank_is_heard_however_little_is_sent(name, memory):
    """Fewer entries than ranks: most regions have no quota, and slots room for hardly one."""
    built = getattr(recipes, name)(density=0.01, memory=memory)
    for n, world in ((64, 8), (32, 8), (64, 3), (1, 6), (200, 16)):

        def make(rank, step, n=n, world=world):
            x = private(rank, step)[:n].clone()
            x[n // 2] = float("nan") if step == 1 and rank == world // 2 else x[n // 2]
            return x

        results = reduce(built, world, make, steps=3)
        assert all(not rank[1][0].isfinite().all() for rank in results)
        assert all(rank[2][0].isfinite().all() for rank in results)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_buckets_smaller_than_the_world(name):
    for n in (1, 2, 5):
        results = reduce(
            recipe(COLLECTIVES[name], density=0.5), 8, lambda r, s, n=n: private(r, s)[:n], steps=3
        )
        check_law(results, 8)


SPARSE = ["topk", "threshold", "gaussiank", "redsync", "sidco", "adtopk", "demo_dct", "gtopk",
          "topkdsa", "slots", "spardl"]  # fmt: skip


@pytest.mark.parametrize("option", [name for name in COLLECTIVE_NAMES if name != "two_level"])
@pytest.mark.parametrize("name", SPARSE)
def test_every_sparse_recipe_takes_every_collective(name, option):
    built = getattr(recipes, name)(density=0.05, collective=option)
    check_law(reduce(built, 3, private, steps=3), 3)


@pytest.mark.parametrize("option", ["gather", "gtopk", "topkdsa", "oktopk", "cheapest"])
def test_momentum_correction_takes_every_collective_whose_sender_keeps(option):
    check_law(reduce(recipes.dgc(density=0.05, collective=option), 3, private, steps=3), 3)


def test_a_wire_of_bits_says_how_many():
    """Eight signs make a byte, and a bitmap costs the same for any number of pairs."""
    assert not wire("sign+bitmap").fixed and wire("sign+int32").fixed and wire("bf16+bitmap").fixed
    for name in ("gather", "gtopk", "topkdsa", "slots"):
        built = recipes.topk(density=0.05, wire="sign+bitmap", collective=name)
        check_law(reduce(built, 3, private, steps=3), 3)


@pytest.mark.parametrize("coded", ["fp32+bitmap", "fp32+u16", "fp16+rice"])
def test_slots_with_codes_that_cost_by_length(coded):
    """Everything large in a tenth of the bucket: one region is nearly all of it, and empty."""

    def make(rank, step):
        scale = torch.full((N,), 1e-3)
        scale[: N // 10] = 10.0
        return private(rank, step) * scale

    check_law(reduce(recipes.slots(density=0.02, wire=coded), 4, make, steps=4), 4, 1e-5)


def test_dense_sums_of_a_sign_wire_do_not_reach_other_parameters():
    """Signs have no zero: such sums stay sparse, and what is routed elsewhere stays exact."""
    built = recipes.adtopk(density=0.2, wire="sign", collective="topkdsa", memory="none")
    draws = [torch.Generator().manual_seed(r) for r in range(3)]
    tensors = [{"w": torch.randn(20, 15, generator=d), "b": torch.randn(9, generator=d)}
               for d in draws]  # fmt: skip
    bias = sum(t["b"] for t in tensors) / 3

    def worker(comm):
        return built.reduce(Bucket.of(tensors[comm.rank], state={}), comm).mean[300:]

    for mean in local.run(3, worker):
        assert torch.allclose(mean, bias, atol=1e-6)


@pytest.mark.parametrize("name", ["topkdsa", "gtopk", "oktopk"])
def test_rounding_others_numbers_is_no_choice_of_mine(name):
    """Momentum is cleared where this rank chose to send, not where it answers for an error."""
    built = getattr(recipes, name)(density=0.05, memory="none", wire="int8")

    def worker(comm):
        x = private(comm.rank)
        sent = built.reduce(Bucket.of({"w": x.clone()}, state={}), comm).sent
        mine = set(x.abs().topk(K).indices.tolist())
        assert sent.entries > 0
        return set(find_chosen(sent).tolist()) <= mine

    assert all(local.run(4, worker))


def test_the_rest_of_a_quota_goes_round():
    """Two entries for four blocks: each block has its turn, in what is chosen and in the sum."""
    results = reduce(recipes.spardl(density=2 / N, memory="none"), 4, lambda r, s: private(0), 4)
    found = [
        [int((block != 0).sum()) for block in results[0][step][0].chunk(4)] for step in range(4)
    ]
    assert found == [[0, 1, 0, 1], [1, 0, 1, 0]] * 2
    select = Select(pick=topk, over=whole, density=2 / N, collective=BlockQuota())

    def first(rank, step):  # the two largest of all lie in the first two blocks
        x = torch.zeros(N)
        x[0] = x[N // 4] = 1.0
        return x

    for step, (mean, *_) in enumerate(reduce(select, 4, first, 4)[0]):
        assert mean.nonzero().reshape(-1).tolist() == [[N // 4], [0]][step % 2]


def test_an_unknown_collective_is_refused():
    with pytest.raises(ValueError, match="collective must be one of gather, gtopk"):
        recipes.topk(collective="carrier pigeon")
    with pytest.raises(ValueError, match="must have sum"):
        recipes.topk(collective=3)
    for owner in (Slots(), BlockQuota(), GTopK(ragged=True, tree=True)):
        with pytest.raises(ValueError, match="sender keeps"):
            recipes.dgc(collective=owner)
