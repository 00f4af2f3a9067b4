"""Ok-Topk: as published, and ours below its bound.

Bytes are counted in units of k(P-1)/P: the paper's bound of 6k words is 24 of them. The default
is a tenth of the size and 40 steps; THINWIRE_FULL=1 runs 4.2 million gradients and 100.
"""

from __future__ import annotations

import os
import sys

import pytest
import torch

from tests.collectives.worlds import K, N, check_law, phases, private, reduce
from thinwire import Bucket, recipes
from thinwire.bucket import whole
from thinwire.collectives.oktopk import OkTopk, proposal
from thinwire.collectives.slots import BINS, Slots, balance, count_above, next_threshold
from thinwire.combinators import Remember
from thinwire.comm import local
from thinwire.comm.metered import Metered
from thinwire.payload import Sparse
from thinwire.reducers import Select
from thinwire.selectors.estimators import histogram
from thinwire.selectors.threshold import Threshold, exact
from thinwire.selectors.topk import topk

FULL = bool(os.environ.get("THINWIRE_FULL"))
SIZE = 4_200_000 if FULL else 420_000
STEPS = 100 if FULL else 40
CASES = [("bf16", 8.5, 4), ("bf16", 8.5, 8), ("fp32+int32", 24.0, 4)]
if FULL:
    CASES += [("fp32+int32", 24.0, 8), ("fp32", 24.0, 4), ("fp32", 24.0, 8)]


def gradient(rank: int, step: int, scale: torch.Tensor) -> torch.Tensor:
    """Half shared, half private, layers of different scale: normal times lognormal."""
    shared, own = (torch.Generator().manual_seed(s) for s in (10**6 + step, 1000 * step + rank))
    n = scale.numel()
    return (torch.randn(n, generator=shared) + torch.randn(n, generator=own)) * scale


def layers(n: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(5)
    return torch.exp(torch.randn(n // 1000 + 1, generator=draw)).repeat_interleave(1000)[:n]


def heavy(n: int) -> torch.Tensor:
    """Every entry has a scale of its own: few of them hold most of the energy."""
    return torch.exp(1.5 * torch.randn(n, generator=torch.Generator().manual_seed(5)))


def figures(world: int, wire: str, scale: torch.Tensor) -> list[tuple[int, int, float, float]]:
    """Rank 0's bytes and entries a step, and the energy of the result beside an exact top-k.

    First of the sum of the ranks' own top-k's, then of the sum of everything they hold.
    """
    recipe, k = recipes.slots(density=0.01, wire=wire), SIZE // 100
    states = [{} for _ in range(world)]

    def worker(comm):
        found = []
        for step in range(STEPS):
            x = gradient(comm.rank, step, scale)
            memory = states[comm.rank].get("slots", {}).get("w", {}).get("memory", {})
            offered = x + memory.get("residual", 0.0)
            theirs = comm.all_reduce(offered * (offered.abs() >= histogram(offered.abs(), k, {})))
            held = comm.all_reduce(offered)
            meter = Metered(comm)
            bucket = Bucket.of({"w": x}, state=states[comm.rank], step=step)
            mean = recipe.reduce(bucket, meter).mean
            best = [float(x.abs().topk(k).values.square().sum()) for x in (theirs, held)]
            got = float((mean * world).square().sum())
            found.append((meter.bytes, int((mean != 0).sum()), got / best[0], got / best[1]))
        return found

    return local.run(world, worker, timeout=600)[0]


@pytest.mark.slow
@pytest.mark.timeout(1800 if FULL else 600)
@pytest.mark.parametrize(("wire", "limit", "world"), CASES)
def test_bytes_and_energy(wire, limit, world):
    k = SIZE // 100
    unit = k * (world - 1) / world
    found = figures(world, wire, layers(SIZE))
    sizes, counts, shares, of_all = zip(*found, strict=True)
    most, mean = max(sizes) / unit, sum(sizes) / STEPS / unit
    entries = sum(counts) / STEPS / k
    energy, of_everything = sum(shares) / STEPS, sum(of_all) / STEPS
    sys.stdout.write(
        f"{wire} world {world}: {mean:.2f} B a unit (at most {most:.2f}, limit {limit}), "
        f"{entries:.3f} k entries, energy {energy:.3f} of the sum of top-k's, "
        f"{of_everything:.3f} of everything"
    )
    assert most <= limit
    assert entries >= 0.95
    assert energy >= 0.9


@pytest.mark.slow
def test_heavy_tails_are_found_even_beside_everything_the_ranks_hold():
    shares = [row[3] for row in figures(4, "bf16", heavy(SIZE))]
    sys.stdout.write(f"energy {sum(shares) / STEPS:.3f} of everything")
    assert sum(shares) / STEPS >= 0.9


def test_an_ordinary_step_is_two_collectives_of_fixed_size():
    results = reduce(recipes.slots(density=K / N), 4, private, steps=5)
    assert phases(results, 0) == ["cut", "split", "gather"]
    for step in range(1, 5):
        assert phases(results, step) == ["split", "gather"]
        sizes = {rank[step][2].bytes for rank in results}
        assert len(sizes) == 1


def test_regions_hold_equally_many_even_where_entries_crowd():
    """All ranks' entries in a tenth of the bucket: regions follow them."""
    counts = torch.zeros(100)
    counts[40:50] = 10
    cuts = balance(counts, 10, 1000, 4)
    assert cuts[0] == 0 and cuts[-1] == 1000 and cuts == sorted(cuts)
    assert all(400 <= cut <= 500 for cut in cuts[1:-1])
    assert balance(torch.zeros(10), 10, 100, 4) == [0, 25, 50, 75, 100]


@pytest.mark.parametrize("seed", range(3))
def test_the_sketches_tell_the_threshold(seed):
    """From 34 numbers of each owner: how many sums of all owners pass, to a few per cent."""
    draw = torch.Generator().manual_seed(seed)
    sums = [torch.randn(5000, generator=draw) * (1 + r) for r in range(4)]
    heads = [count_above(x, float(x.abs().topk(250).values[-1])) for x in sums]
    assert heads[0].numel() == 2 + BINS
    theta = next_threshold(heads, 1000)
    assert theta is not None
    assert sum(int((x.abs() >= theta).sum()) for x in sums) == pytest.approx(1000, rel=0.05)


def test_nothing_can_be_told_from_nothing():
    empty = count_above(torch.empty(0), 0.0)
    assert next_threshold([empty, empty], 10) is None
    broken = count_above(torch.tensor([float("nan")]), float("nan"))
    assert next_threshold([broken, count_above(torch.randn(50), 1.0)], 10) is None


def test_the_threshold_follows_a_change_of_scale():
    """Gradients a thousand times smaller: one thin step, then each owner's own part of k."""

    def make(rank, step):
        return private(rank, step) * (1.0 if step < 3 else 1e-3)

    recipe = recipes.slots(density=K / N, memory="none")
    results = reduce(recipe, 4, make, steps=10)
    assert all(int((results[0][step][0] != 0).sum()) > K / 2 for step in (2, 4, 5, 9))


def test_steps_without_gradients_do_not_wear_the_threshold_out():
    def make(rank, step):
        return private(rank, step) * (step < 2 or step > 60)

    recipe = recipes.slots(density=K / N, memory="none")
    results = reduce(recipe, 4, make, steps=66)
    for step in (62, 63, 65):
        assert K / 2 < int((results[0][step][0] != 0).sum()) <= 2 * K  # slots of ten


def published(**options):
    select = Select(pick=topk, over=whole, density=K / N, collective=OkTopk(**options))
    return Remember(select)


@pytest.mark.parametrize("world", [1, 2, 3, 4, 7])
def test_an_exact_step_keeps_the_k_largest_sums(world):
    results = reduce(published(refresh=1), world, private, steps=1)
    total = torch.zeros(N)
    for rank in range(world):
        best = private(rank).abs().topk(K).indices
        total[best] += private(rank)[best]
    best = total.abs().topk(K).indices
    expected = torch.zeros(N)
    expected[best] = total[best] / world
    assert torch.allclose(results[0][0][0], expected, atol=1e-6)


def test_the_published_schedule():
    """Regions every second step here, exact every third: both agreed on, both on the first."""
    results = reduce(published(refresh=3, balance_every=2, form="all_to_all"), 4, private, steps=6)
    cut, exact = ["cut"], ["split", "count", "gather all"]
    usual = ["split", "count", "gather"]
    seen = [[p for p in phases(results, step) if p != "spread"] for step in range(6)]
    assert seen == [cut + exact, usual, cut + usual, exact, cut + usual, usual]


def test_survivors_are_spread_when_one_owner_has_them_all():
    """Everybody's entries in one region; each rank gathers a quarter of them in the end."""

    def make(rank, step):
        x = torch.zeros(N)
        x[: N // 8] = private(0, 0)[: N // 8] * (10 if step else 1)
        x[N // 2 :] = private(rank, 1)[N // 2 :] * (1e-3 if step else 1)
        return x

    recipe = published(balance_every=100, refresh=100, spread_above=1.5, form="all_to_all")
    results = reduce(recipe, 4, make, steps=3)
    assert "spread" in phases(results, 1)
    check_law(results, 4)
    gathered = [e for rank in results for e in rank[1][2].events if e.phase == "gather"]
    assert max(e.bytes for e in gathered) <= min(e.bytes for e in gathered) + 3 * 8


def test_cut_points_are_proposed_by_load():
    mine = Sparse(torch.tensor([1, 2, 3, 50, 51, 52, 53, 90]), torch.ones(8), 100)
    assert proposal(mine, 4).tolist() == [3, 51, 53]
    assert proposal(Sparse(mine.indices[:2], mine.values[:2], 100), 4).tolist() == [25, 50, 75]


def test_the_published_bound_and_what_exceeds_it():
    """The table of `OkTopk` and docs/communication.md: 24 bytes in units of k(P-1)/P, rank 0."""
    n, world, recipe = 42_000, 4, recipes.oktopk(density=0.01)
    scale, states = layers(n), [{} for _ in range(world)]

    def worker(comm):
        sizes = []
        for step in range(65):
            meter = Metered(comm)
            bucket = Bucket.of(
                {"w": gradient(comm.rank, step, scale)}, state=states[comm.rank], step=step
            )
            recipe.reduce(bucket, meter)
            sizes.append(meter.bytes / (n // 100 * (world - 1) / world))
        return sizes

    sizes = local.run(world, worker)[0]

    def mean(first, last):
        return sum(sizes[first : last + 1]) / (last + 1 - first)

    table = [mean(0, 0), mean(1, 3), mean(4, 31), mean(32, 32), mean(33, 63), mean(64, 64)]
    assert table == pytest.approx([30.1, 24.5, 28.5, 46.7, 22.8, 38.3], abs=0.1)
    above = [step for step, size in enumerate(sizes) if size > 24]
    assert set(above) >= {0, *range(4, 32), 32, 64} and not set(above) & set(range(50, 64))
    written = " ".join((OkTopk.__doc__ or "").split())
    assert "mean 30.1 24.5 28.5 46.7 22.8 38.3" in written


def collective_state(states, rank=0):
    return next(iter(states[rank]["layouts"].values()))["collective"]


def test_the_published_settings():
    """Intervals and factors of the authors' VGG runs; exact in steps 0 and 32 and no other."""
    built = recipes.oktopk(density=K / N)
    assert built.inner.collective == OkTopk(
        balance_every=64, refresh=32, nudge=1.008, spread_above=4.0, form="pairwise"
    )
    assert built.inner.pick == Threshold(
        estimate=exact, refresh=32, nudge=1.012, correct=None, capacity=4 / 3
    )
    results = reduce(built, 2, private, steps=34)
    assert [s for s in range(34) if "gather all" in phases(results, s)] == [0, 32]


@pytest.mark.parametrize(("scale", "factor"), [(3.0, 1.008), (1 / 3, 1 / 1.008), (1.0, 1.0)])
def test_the_global_threshold_is_nudged_towards_k(scale, factor):
    """Up where too many passed, down where too few did."""
    states = [{} for _ in range(3)]
    seen = []
    for step in range(2):

        def worker(comm, step=step):
            x = private(comm.rank) * (scale if step else 1.0)
            bucket = Bucket.of({"w": x}, state=states[comm.rank], step=step)
            published().inner.reduce(bucket, comm)

        local.run(3, worker)
        seen.append(collective_state(states)["threshold"])
    assert seen[1] == pytest.approx(seen[0] * factor)


def test_slots_are_balanced_anew():
    """Every 64 steps regions follow where entries lie now; in between they stay."""
    states = [{} for _ in range(2)]
    recipe = recipes.slots(density=K / N, memory="none")
    cuts = {}
    for step in (0, 1, 63, 64):

        def worker(comm, step=step):
            x = torch.zeros(N)
            x[: N // 8] = private(comm.rank)[: N // 8]
            bucket = Bucket.of({"w": x.flip(0) if step else x}, state=states[comm.rank], step=step)
            recipe.reduce(bucket, comm)

        local.run(2, worker)
        cuts[step] = collective_state(states)["cuts"].tolist()[1]
    assert cuts[0] == cuts[1] == cuts[63] < N / 8 and cuts[64] > 7 * N / 8


def test_options_are_checked():
    for wrong in ({"every": 0}, {"slack": 0.5}, {"reach": 0.0}, {"form": "pigeon"}):
        with pytest.raises(ValueError, match="got"):
            Slots(**wrong)
    for wrong in ({"refresh": 0}, {"nudge": 0.9}, {"form": "tree"}):
        with pytest.raises(ValueError, match="got"):
            OkTopk(**wrong)
