"""Combinators: what each adds, and that none of them loses anything."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from thinwire import Bucket, recipes
from thinwire.collectives.gather import AllGather
from thinwire.combinators import Alternate, Remember, Route, Warmup, Watch, dense, remembers
from thinwire.comm import local
from thinwire.comm.metered import Metered
from thinwire.reducers import Select
from thinwire.selectors.topk import topk

SHAPES = {"w": (10, 10), "b": (10,)}


def grads(rank: int, step: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(100 * step + rank)
    return {name: torch.randn(shape, generator=draw) for name, shape in SHAPES.items()}


def flat(rank: int, step: int) -> torch.Tensor:
    return torch.cat([g.reshape(-1) for g in grads(rank, step).values()])


def run(recipe, steps, world=2, **changes):
    states = [{} for _ in range(world)]

    def worker(comm):
        results = []
        for step in range(steps):
            bucket = Bucket.of(grads(comm.rank, step), state=states[comm.rank], step=step)
            reduced = recipe.reduce(replace(bucket, **changes), comm)
            results.append((reduced.mean.clone(), reduced))
        return results

    return local.run(world, worker), states


def test_warmup_is_dense_and_then_not():
    results, _ = run(recipes.topk(density=0.05, warmup=2), 4)
    entries = [reduced.sent.entries for _, reduced in results[0]]
    assert entries == [110, 110, 6, 6]
    expected = (flat(0, 0) + flat(1, 0)) / 2
    assert torch.allclose(results[0][0][0], expected)


def test_a_dense_step_delivers_the_residual_at_once():
    inner = Select(pick=topk, density=0.05)
    results, states = run(Remember(Alternate(inner, dense())), 2)
    total = sum(mean for mean, _ in results[0])
    everything = sum(flat(rank, step) for rank in (0, 1) for step in (0, 1)) / 2
    assert torch.allclose(total, everything, atol=1e-6)
    residual = states[0]["slots"]["w"]["memory"]["residual"]
    assert not residual.any()


def test_alternate_goes_by_the_step_and_keeps_states_apart():
    results, _ = run(Alternate(recipes.topk(0.5), recipes.acpsgd(2)), 3)
    assert [type(r.sent).__name__ for _, r in results[0]] == ["Sparse", "Parts", "Sparse"]
    prices = [Alternate(recipes.dense(), recipes.topk()).traffic(_layout(), 4, s) for s in (0, 1)]
    assert prices == [recipes.dense().traffic(_layout(), 4), recipes.topk().traffic(_layout(), 4)]


def _layout():
    return Bucket.of(grads(0, 0), state={}).layout


def test_route_sends_each_parameter_its_way():
    recipe = Route(lambda slot: slot.name == "b", recipes.dense(), Select(pick=topk, density=0.1))
    results, _ = run(recipe, 1)
    mean, reduced = results[0][0]
    assert reduced.sent.entries == 10 + 10
    assert torch.allclose(mean[100:], (flat(0, 0) + flat(1, 0))[100:] / 2)


def test_route_with_memory_on_one_side_only():
    recipe = Route(
        lambda slot: slot.name == "b", recipes.topk(0.1, memory="none"), recipes.topk(0.1)
    )
    results, states = run(recipe, 3, world=3)
    sent = [[r.sent.add_into(torch.zeros(110)) for _, r in rank] for rank in results]
    for step in range(3):
        average = sum(s[step] for s in sent) / 3
        assert torch.allclose(results[0][step][0], average, atol=1e-6)
    kept = states[0]["slots"]["w"]["no/memory"]["residual"].reshape(-1)
    assert "no/memory" not in states[0]["slots"]["b"]
    total = sum(flat(0, step)[:100] for step in range(3))
    assert torch.allclose(kept + sum(s[:100] for s in sent[0]), total, atol=1e-6)


def test_an_aborted_branch_undoes_the_other():
    recipe = Route(lambda slot: slot.name == "b", recipes.topk(0.1), recipes.topk(0.1))
    states = [{}, {}]

    def worker(comm):
        bad = grads(comm.rank, 0)
        bad["w"][0, 0] = float("nan")
        return recipe.reduce(Bucket.of(bad, state=states[comm.rank]), comm)

    results = local.run(2, worker)
    assert all(not r.finite and r.sent.entries == 0 for r in results)
    assert torch.allclose(states[0]["slots"]["b"]["yes/memory"]["residual"], grads(0, 0)["b"])


def test_watch_sees_everything_and_changes_nothing():
    seen = []

    def probe(grad, x, reduced, comm):
        if comm.rank == 0:
            seen.append((grad.clone(), x.clone(), reduced.sent.add_into(torch.zeros(110))))

    inner = Select(pick=topk, density=0.05)
    plain, _ = run(Remember(inner), 5)
    watched, _ = run(Remember(Watch(inner=inner, probe=probe, every=2)), 5)
    assert all(torch.equal(a[0], b[0]) for a, b in zip(plain[0], watched[0], strict=True))
    assert len(seen) == 3
    for (grad, x, sent), step in zip(seen, (0, 2, 4), strict=True):
        assert torch.equal(grad, flat(0, step))
        assert torch.equal(sent[sent != 0], x[sent != 0])

    def talks(grad, x, reduced, comm):
        comm.all_reduce(torch.ones(1000))

    meters = []

    def worker(comm):
        meter = Metered(comm)
        recipe = Remember(Watch(inner=inner, probe=talks))
        recipe.reduce(Bucket.of(grads(comm.rank, 0), state={}), meter)
        meters.append((meter.traffic, recipe.traffic(_layout(), 2)))

    local.run(2, worker)
    assert all(metered == priced for metered, priced in meters), "a probe's bytes do not count"
    with pytest.raises(ValueError, match="every must be at least 1"):
        Watch(inner=inner, probe=probe, every=0)


def test_residuals_are_in_unscaled_units():
    plain, unscaled = run(recipes.topk(0.05), 3)
    scaled, states = run(recipes.topk(0.05), 3, scale=1024.0)
    # the same gradients, so a scale of 1024 means true gradients 1024 times smaller
    for name in SHAPES:
        a = unscaled[0]["slots"][name]["memory"]["residual"]
        b = states[0]["slots"][name]["memory"]["residual"]
        assert torch.allclose(a, b * 1024.0)
    assert torch.allclose(plain[0][2][0], scaled[0][2][0])


WITH_MEMORY = [
    recipes.topk(0.1),
    recipes.adtopk(0.1),
    recipes.acpsgd(2),
    recipes.half(memory="residual"),
    recipes.randomk(0.1),
]


@pytest.mark.parametrize("recipe", WITH_MEMORY)
def test_what_no_rank_used_keeps_its_residual(recipe):
    """DDP discards the mean of such a parameter, so nothing may be counted as sent."""
    states = [{}, {}]

    def step(number, unused):
        def worker(comm):
            g = grads(comm.rank, number)
            for name in unused[comm.rank]:
                g[name].zero_()
            bucket = Bucket.of(g, state=states[comm.rank], step=number)
            return recipe.reduce(replace(bucket, unused=frozenset(unused[comm.rank])), comm)

        return local.run(2, worker)

    assert step(0, [set(), set()])[0].unused == ()
    before = states[0]["slots"]["w"]["memory"]["residual"].clone()
    both = step(1, [{"w"}, {"w"}])
    assert [r.unused for r in both] == [("w",), ("w",)]
    assert torch.equal(states[0]["slots"]["w"]["memory"]["residual"], before)
    assert not both[0].mean[:100].any()
    both[0].undo()
    assert torch.equal(states[0]["slots"]["w"]["memory"]["residual"], before)
    assert step(2, [{"w"}, set()])[1].unused == ()


def test_who_remembers():
    quiet = [recipes.dense(), recipes.half(), recipes.topk(memory="none", warmup=3),
             recipes.adtopk(memory="none"), Watch(inner=dense(), probe=print)]  # fmt: skip
    assert not any(map(remembers, quiet))
    holding = [recipes.topk(), Route(bool, dense(), recipes.topk()), Warmup(2, recipes.topk()),
               Alternate(dense(), recipes.topk()), object()]  # fmt: skip
    assert all(map(remembers, holding))


def test_a_memory_inside_a_memory_is_refused():
    with pytest.raises(ValueError, match="count everything twice"):
        Remember(recipes.topk())


def test_a_sum_is_not_added_twice_behind_gaps():
    """Watch evaluates x before the reducer does, here on a sub-bucket with a gap."""
    inner = Watch(inner=Select(pick=topk, density=0.05), probe=lambda *seen: None)
    plain = Route(lambda slot: slot.name == "b", recipes.dense(), Select(pick=topk, density=0.05))
    watched = Route(lambda slot: slot.name == "b", recipes.dense(), inner)
    expected, _ = run(Remember(plain), 3)
    got, _ = run(Remember(watched), 3)
    assert all(torch.equal(a[0], b[0]) for a, b in zip(expected[0], got[0], strict=True))


def test_a_mean_that_overflows_its_scale_counts_as_not_sent():
    state: dict = {}

    def worker(comm):
        bucket = Bucket.of({"w": torch.full((4,), 3e38)}, state=state)
        state["slots"] = {"w": {"memory": {"residual": torch.full((4,), 1e36)}}}
        return recipes.topk(0.5).reduce(replace(bucket, scale=1024.0), comm)

    (reduced,) = local.run(1, worker)
    assert not reduced.finite
    assert not reduced.mean.isfinite().all()
    # under this scale it would overflow every later sum too
    assert state["slots"]["w"]["memory"]["residual"].eq(0).all()


def test_a_ragged_selector_that_chose_nothing_still_tells_of_a_nan():
    def none(rows, k, state):
        return torch.empty(0, dtype=torch.int64)

    recipe = Remember(Select(pick=none, collective=AllGather(ragged=True)))

    def worker(comm):
        bad = grads(comm.rank, 0)
        if comm.rank == 1:
            bad["w"][2, 2] = float("inf")
        return recipe.reduce(Bucket.of(bad, state={}), comm).finite

    assert local.run(3, worker) == [False, False, False]


def test_bad_warmup():
    with pytest.raises(ValueError, match="warmup must be a whole number"):
        Warmup(-1, dense())
