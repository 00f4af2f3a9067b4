"""Recipes: what they refuse, what they keep, and that a new one is fifteen lines."""

from __future__ import annotations

import inspect

import pytest
import torch

from thinwire import Bucket, recipes
from thinwire.bucket import by_row, flat_indices
from thinwire.choose import Choose
from thinwire.collectives.cheapest import Cheapest
from thinwire.collectives.gather import AllGather
from thinwire.collectives.gtopk import GTopK
from thinwire.combinators import Remember
from thinwire.comm import local
from thinwire.describe import parts
from thinwire.memory import MomentumCorrected, Residual
from thinwire.reducers import Select
from thinwire.schedule import Piecewise, Ramp

DENSITY = ["randomk", "topk", "adtopk"]
RANK = ["powersgd", "acpsgd"]


@pytest.mark.parametrize("density", [0, 1.5, float("nan"), -1])
@pytest.mark.parametrize("name", DENSITY)
def test_bad_density(name, density):
    with pytest.raises(ValueError, match=r"density must be in \(0, 1\], got .*; 0.01 keeps"):
        getattr(recipes, name)(density=density)


@pytest.mark.parametrize("rank", [0, -1, 1.5, None, "a", True])
@pytest.mark.parametrize("name", RANK)
def test_bad_rank(name, rank):
    with pytest.raises(ValueError, match="rank must be a whole number of at least 1, got"):
        getattr(recipes, name)(rank=rank)


@pytest.mark.parametrize(("keywords", "message"), [
    ({"memory": "elephant"}, "memory must be 'none', 'residual' or 'momentum'"),
    ({"wire": "int3"}, "wire must be one of fp32, fp16, bf16, .*, got 'int3'"),
    ({"warmup": -5}, "warmup must be a whole number"),
])  # fmt: skip
@pytest.mark.parametrize("name", DENSITY + RANK)
def test_bad_options(name, keywords, message):
    with pytest.raises(ValueError, match=message):
        getattr(recipes, name)(**keywords)


@pytest.mark.parametrize(("call", "message"), [
    (lambda: recipes.dgc(ramp=(0.25, 1.5), every=10), r"density must be in \(0, 1\], got 1.5"),
    (lambda: recipes.dgc(2.0, ramp=2, every=3), r"density must be in \(0, 1\], got 2.0"),
    (lambda: recipes.dgc(ramp="ab", every=3), "ramp must be a list of densities or a number"),
    (lambda: recipes.dgc(ramp=2.5, every=3), "ramp must be a list of densities or a number"),
    (lambda: recipes.dgc(ramp=-3, every=10), "epochs must be a whole number of at least 1, got -3"),
    (lambda: recipes.dgc(every=7), "got every=7 without a ramp"),
    (lambda: recipes.topk(Ramp(start=2.0, end=0.1, steps=10)), "density must be in"),
    (lambda: recipes.topk({}), "densities by parameter need at least one"),
    (lambda: recipes.threshold(value="a"), "a threshold must be a number"),
    (lambda: recipes.threshold(capacity="x"), "capacity must be at least 1.0"),
    (lambda: recipes.terngrad(clip="a"), "clip must be above 0"),
    (lambda: recipes.topk(memory=Residual), "memory must be 'none', 'residual' or 'momentum'"),
    (lambda: recipes.topk(refresh=0), "refresh must be a whole number of at least 1, got 0"),
    (lambda: recipes.demo_dct(memory="none", decay=0.5), "decay belongs to the residual"),
    (lambda: recipes.gaussiank(collective=AllGather()), r"counts vary.*AllGather\(ragged=True\)"),
    (lambda: recipes.threshold(density=1.0, value=2.0), "1.0 sends everything, whatever its value"),
    (lambda: recipes.threshold({"": 1}, value=2.0), "1.0 sends everything, whatever its value"),
    (lambda: recipes.topk({"": 0.1, "head": 1.0}), "'' is found in every name.*put '' last"),
    (lambda: recipes.gtopk(tree=True, collective="spardl"), "tree is gtopk's own collective, got"),
    (lambda: recipes.gtopk(tree=True, collective=GTopK()), "tree is gtopk's own collective, got"),
    (lambda: recipes.adtopk(no_feedback=["w"], memory="none"), "no_feedback says which parameters"),
    (lambda: recipes.adtopk(estimate=0), "estimate must be True, False or a first interval"),
    (lambda: recipes.adtopk(estimate="no"), "estimate must be True, False or a first interval"),
    (lambda: recipes.adtopk(interleave="no"), "interleave must be True, False or a period"),
    (lambda: recipes.adtopk(interleave=0), "interleave must be True, False or a period"),
    (lambda: recipes.auto(rank=2, among=("dense", "topk")), "rank is for acpsgd, powersgd, got"),
    (lambda: recipes.auto(0.1, among=("dense", "acpsgd")), "density is for topk, adtopk, .*got"),
])  # fmt: skip
def test_what_cannot_work_is_refused_at_construction(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(("build", "flag"), [
    (recipes.adtopk, "partial"), (recipes.topk, "partial"), (recipes.gtopk, "tree"),
    (recipes.dgc, "hierarchical"), (recipes.redsync, "trim"),
    (Residual, "learning_rate"), (MomentumCorrected, "learning_rate"),
    (MomentumCorrected, "nesterov"), (AllGather, "ragged"), (GTopK, "ragged"), (GTopK, "tree"),
])  # fmt: skip
@pytest.mark.parametrize("given", ["no", 0, None])
def test_what_is_true_or_false_is_nothing_else(build, flag, given):
    """A string such as "no" would count as true."""
    with pytest.raises(ValueError, match=f"^{flag} must be True or False, got {given!r}"):
        build(**{flag: given})
    build(**{flag: True})
    build(**{flag: False})


def test_every_flag_of_a_recipe_is_checked():
    flags = {
        (name, option.name)
        for name in recipes.names()
        for option in inspect.signature(getattr(recipes, name)).parameters.values()
        if option.annotation == "bool"
    }
    assert {flag for _, flag in flags} == {"clipped", "partial", "tree", "hierarchical", "trim"}
    for name, flag in flags:
        with pytest.raises(ValueError, match=f"{flag} must be True or False, got 'no'"):
            recipes.parse(f"{name}({flag}='no')")


def test_thresholds_value_counts_below_density_one():
    sizes = torch.arange(100.0)
    for value, entries in ((90.0, 10), (3.0, 97), (200.0, 0)):
        recipe = recipes.threshold(density=0.99, value=value)
        bucket = Bucket.of({"w": sizes.clone()}, state={})
        assert local.run(1, lambda c, r=recipe, b=bucket: r.reduce(b, c))[0].sent.entries == entries


def test_autos_rank_and_density_reach_its_candidates():
    among = ("dense", "acpsgd", "powersgd", "topk", "randomk")
    found = list(parts(recipes.auto(0.07, rank=3, among=among).inner))
    choices = dict(next(part for part in found if isinstance(part, Choose)).choices)
    assert [choices[name].frame.rank for name in ("acpsgd", "powersgd")] == [3, 3]
    assert choices["topk"].density == choices["randomk"].frame.density == 0.07


def dgc_counts(magnitude, hierarchical):
    """How many of 10,000 entries go, where 2 % are above what the sample takes for 1 %."""
    x = torch.linspace(0.01, 0.5, 10_000)
    sampled = torch.arange(0, 10_000, 49)  # where the first sample looks
    others = [i for i in range(10_000) if i % 49]
    x[sampled[:3]] = 1.0  # the sample's threshold: its third largest
    x[others[: magnitude - 3]] = 2.0 + torch.arange(magnitude - 3) / 1000
    recipe = recipes.dgc({"": 0.01}, hierarchical=hierarchical, memory="none")
    bucket = Bucket.of({"w": x}, state={})
    return local.run(1, lambda comm: recipe.reduce(bucket, comm))[0].sent.entries


@pytest.mark.parametrize("found", [72, 78, 90, 100, 110, 128])
def test_dgc_without_hierarchy_takes_what_the_threshold_lets_through(found):
    """From 0.7 to 1.3 times the density: neither topped up nor cut."""
    assert dgc_counts(found, hierarchical=False) == found


@pytest.mark.parametrize("found", [40, 66, 134, 190, 400])
def test_dgc_without_hierarchy_corrects_other_thresholds(found):
    assert 70 <= dgc_counts(found, hierarchical=False) <= 130
    assert dgc_counts(found, hierarchical=False) != found


@pytest.mark.parametrize("found", [40, 78, 82, 128, 190, 400])
def test_dgc_with_hierarchy_never_takes_more_than_its_density(found):
    assert 80 <= dgc_counts(found, hierarchical=True) <= 100


def test_bad_rows():
    with pytest.raises(ValueError, match="rows must be one of matrix, dim1, longer, dim0"):
        recipes.adtopk(rows="diagonal")


def test_unknown_recipes_list_the_known_ones():
    known = ", ".join(recipes.names())
    with pytest.raises(ValueError, match=f"unknown recipe 'topq'; known are {known}"):
        recipes.parse("topq(density=0.1)")
    with pytest.raises(ValueError, match="unknown recipe 'topq'"):
        _ = recipes.topq
    assert not hasattr(recipes, "topq")


def test_parse_reads_calls_as_they_are_typed():
    assert recipes.parse("topk(density=0.02)") == recipes.topk(density=0.02)
    assert recipes.parse(" adtopk(0.02, rows='dim1') ") == recipes.adtopk(0.02, rows="dim1")
    assert recipes.parse("dense") == recipes.dense()
    cheapest = Cheapest(sparse=GTopK(ragged=True), by="fill")
    written = 'topk(collective=Cheapest(sparse=GTopK(ragged=True), by="fill"))'
    assert recipes.parse(written) == recipes.topk(collective=cheapest)


@pytest.mark.parametrize("call", ["", "topk(", "topk(density=open('x'))", "topk(speed=9)",
                                  "__import__('os')", "1 + 1", "topk(density=0.1)(2)",
                                  "topk(density={[]: 1})", "topk(density={huge: 1.0, '': 0.1})",
                                  "topk(density=" + "-" * 5000 + "1)"])  # fmt: skip
def test_parse_refuses_everything_else(call):
    with pytest.raises(ValueError, match=r"recipe"):
        recipes.parse(call)


def reduce(recipe, tensors, world=2, steps=1):
    states = [{} for _ in range(world)]

    def worker(comm):
        for step in range(steps):
            draw = torch.Generator().manual_seed(10 * comm.rank + step)
            grads = {name: torch.randn(t, generator=draw) for name, t in tensors.items()}
            last = recipe.reduce(Bucket.of(grads, state=states[comm.rank], step=step), comm)
        return last

    return local.run(world, worker)


@pytest.mark.parametrize("density", [0.001, 0.01, 0.05, 0.33, 1.0])
def test_adtopk_sends_from_every_row_and_meets_the_budget(density):
    shapes = {"w": (37, 53), "b": (37,), "conv": (8, 5, 3, 3)}
    for reduced in reduce(recipes.adtopk(density=density), shapes):
        sent = reduced.sent.add_into(torch.zeros(37 * 53 + 37 + 360))
        rows = (sent[: 37 * 53].view(37, 53) != 0).sum(dim=1)
        assert rows.min() >= 1
        assert rows.sum() == max(37, int(density * 37 * 53 + 0.5))
        assert (sent[37 * 53 : 37 * 53 + 37] != 0).all(), "vectors stay dense"
        channels = (sent[-360:].view(8, 45) != 0).sum(dim=1)
        assert channels.sum() == max(8, int(density * 360 + 0.5))


def test_adtopk_dense_rule_is_the_callers():
    shapes = {"head.w": (10, 20), "body.w": (10, 20), "b": (10,)}
    recipe = recipes.adtopk(density=0.1, dense=lambda slot: slot.name.startswith("head"))
    sent = reduce(recipe, shapes)[0].sent.add_into(torch.zeros(410))
    assert (sent[:200] != 0).all()
    assert (sent[200:400] != 0).sum() == 20
    assert (sent[400:] != 0).sum() == 1


@pytest.mark.parametrize("density", [0.002, 0.01, 0.2, 1.0])
@pytest.mark.parametrize("name", ["topk", "randomk"])
def test_density_is_respected(name, density):
    shapes = {"w": (40, 60), "b": (40,)}
    expected = sum(max(1, int(n * density + 0.5)) for n in (2400, 40))
    for reduced in reduce(getattr(recipes, name)(density=density), shapes):
        assert reduced.sent.entries == expected


def test_density_may_be_a_schedule():
    recipe = recipes.topk(density=Piecewise((2,), (0.5, 0.1)))
    assert reduce(recipe, {"w": (10, 10)}, steps=2)[0].sent.entries == 50
    assert reduce(recipe, {"w": (10, 10)}, steps=3)[0].sent.entries == 10
    with pytest.raises(ValueError, match="density must be in"):
        reduce(recipes.topk(density=lambda step: 2.0), {"w": (10, 10)})


def test_a_new_selector_is_fifteen_lines():
    """The example of the documentation, with state a row, over rows whose blocks shift."""

    def steady_sign(rows, k, state):
        last = state.get("sign", torch.zeros_like(rows))
        state["sign"] = rows.sign()
        score = rows.abs() * (rows.sign() == last)
        return flat_indices(score.topk(k, dim=1).indices, rows)

    recipe = Remember(Select(pick=steady_sign, over=by_row, density=0.01))
    results = reduce(recipe, {"w": (128, 250), "b": (7,)}, world=3, steps=5)
    average = sum(r.sent.add_into(torch.zeros(128 * 250 + 7)) for r in results) / 3
    assert torch.allclose(results[0].mean, average, atol=1e-6)
    assert results[0].sent.entries == 320 + 1


def test_a_selector_with_varying_counts_must_say_so():
    def above_one(rows, k, state):
        return (rows.abs() > 1).reshape(-1).nonzero().reshape(-1)

    with pytest.raises(ValueError, match=r"chose .* entries where 10 .*ragged=True"):
        reduce(Select(pick=above_one, density=0.1), {"w": (10, 10)})
    ragged = Remember(Select(pick=above_one, density=0.1, collective=AllGather(ragged=True)))
    results = reduce(ragged, {"w": (10, 10)}, world=4, steps=3)
    average = sum(r.sent.add_into(torch.zeros(100)) for r in results) / 4
    assert torch.allclose(results[0].mean, average, atol=1e-6)


def test_randomk_draws_alike_everywhere_and_anew_every_step():
    def indices(step, bucket_names):
        def worker(comm):
            grads = {name: torch.ones(50, 2) for name in bucket_names}
            bucket = Bucket.of(grads, state={}, step=step)
            return recipes.randomk(density=0.1).reduce(bucket, comm).sent.indices.tolist()

        a, b = local.run(2, worker)
        assert a == b
        return a

    assert indices(0, ["x"]) != indices(1, ["x"])
    both = indices(0, ["y", "x"])
    assert indices(0, ["x"]) == [i - 100 for i in both if i >= 100]
    assert indices(0, ["x"]) != [i for i in both if i < 100], "others for a parameter as large"
