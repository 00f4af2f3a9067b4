"""ADTopk: contraction, no row left out, interleaving, densities by name, untouched rows."""

from __future__ import annotations

import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire import Bucket, recipes
from thinwire.bucket import by_row
from thinwire.collectives.gather import AllGather
from thinwire.combinators import Alternate, Remember, Route
from thinwire.comm import local
from thinwire.comm.metered import Metered
from thinwire.layout import Layout, small
from thinwire_lab.bench import rows as lab


def reduce(recipe, tensors, steps=1, world=1, start=0):
    """The last step's (sent, bytes) of every rank; `tensors` is a function of (rank, step)."""

    def worker(comm):
        state: dict = {}
        for step in range(start, start + steps):
            meter = Metered(comm)
            bucket = Bucket.of(tensors(comm.rank, step), state=state, step=step)
            reduced = recipe.reduce(bucket, meter)
        numel = bucket.layout.numel
        return reduced.sent.add_into(torch.zeros(numel)), meter.traffic.bytes

    return local.run(world, worker)


def alone(recipe, tensors, **keywords):
    """What the only rank sends."""
    return reduce(recipe, tensors, **keywords)[0][0]


def drawn(shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=60)
@given(st.integers(1, 12), st.integers(2, 60), st.floats(0.01, 1.0), st.integers(0, 10**6))
def test_contraction_row_by_row(r, c, density, seed):
    """||x - C(x)||^2 <= (1 - k_row / C) ||x||^2 in every row."""
    x = drawn((r, c), seed).pow(3)
    recipe = recipes.adtopk(density=density, memory="none", dense=None)
    sent = alone(recipe, lambda rank, step: {"w": x})
    left = (x - sent.view(r, c)).square().sum(dim=1)
    bucket = Bucket.of({"w": x}, state={})
    for piece in by_row(bucket, density):
        first, last = piece.block[:2] if piece.block else (0, r)
        energy = x[first:last].square().sum(dim=1)
        assert (left[first:last] <= (1 - piece.k / c) * energy * (1 + 1e-5)).all()


def test_no_row_goes_unserved_where_flat_top_k_leaves_some_out(capsys):
    """Real gradients of the digits model, ten steps of training with feedback."""
    pytest.importorskip("sklearn")
    shares = lab.find_unserved(["adtopk(density=0.01)", "topk(density=0.01)"], steps=10)
    with capsys.disabled():
        figures = ", ".join(f"{call} {100 * share:.1f} %" for call, share in shares.items())
        sys.stdout.write(f"\nrows that send nothing in a step (digits model): {figures}\n")
    assert shares["adtopk(density=0.01)"] == 0.0
    assert shares["topk(density=0.01)"] > 0.05


@pytest.mark.parametrize(("keywords", "dense_rows"), [
    ({"interleave": True}, [1, 0, 1, 0, 1, 0]),
    ({"interleave": (2, 1)}, [1, 1, 0, 1, 1, 0]),
    ({"interleave": (1, 2)}, [1, 0, 0, 1, 0, 0]),
    ({"interleave": True, "steps": 4}, [1, 0, 1, 1, 1, 1]),
    ({"interleave": True, "steps": 10, "fraction": 0.2}, [1, 0, 1, 1, 1, 1]),
    ({"interleave": True, "estimate": True}, [1, 0, 1, 0, 1, 0]),
])  # fmt: skip
def test_interleaving_goes_by_the_shared_step(keywords, dense_rows):
    """A gradient with one large row: flat turns send only from there."""
    recipe = recipes.adtopk(density=0.05, memory="none", **keywords)
    x = drawn((20, 40))
    x[7] *= 1000
    for step, everywhere in enumerate(dense_rows):
        sent = alone(recipe, lambda rank, step: {"w": x}, start=step)
        served = (sent.view(20, 40) != 0).any(dim=1).sum()
        assert served == (20 if everywhere else 1)


def test_one_residual_serves_both_turns():
    """What the all-dimension turn leaves over, the flat turn sends."""
    recipe = recipes.adtopk(density=0.05, interleave=True)
    assert isinstance(recipe, Remember)
    x = drawn((20, 40))
    x[7] *= 1000
    sent = alone(recipe, lambda rank, step: {"w": x if step == 0 else 0 * x}, steps=2)
    assert (sent.view(20, 40)[7] != 0).sum() == 38, "two went in the first step"
    assert torch.allclose(sent.view(20, 40)[7].abs().max(), x[7].abs().sort().values[-3])


def test_densities_by_name_are_the_callers():
    recipe = recipes.adtopk(density={r"head\.": 0.5, "": 0.1})
    shapes = {"head.w": (10, 20), "body.w": (10, 20)}
    sent = alone(recipe, lambda r, s: {n: drawn(shape) for n, shape in shapes.items()})
    assert [(part != 0).sum().item() for part in sent.split(200)] == [100, 20]
    with pytest.raises(ValueError, match=r"no density for parameter 'body.w'"):
        reduce(recipes.topk(density={"head": 0.5}), lambda r, s: {"body.w": drawn((4, 4))})
    with pytest.raises(ValueError, match=r"density must be in \(0, 1\]"):
        recipes.topk(density={"": 2.0})
    with pytest.raises(ValueError, match="is not a pattern"):
        recipes.topk(density={"(": 0.1})


@pytest.mark.parametrize("name", ["topk", "randomk", "sidco", "demo_dct"])
def test_densities_by_name_for_the_others(name):
    recipe = getattr(recipes, name)(density={"^a": 0.5, "": 0.1})
    layouts = [Layout.of({n: torch.empty(20, 50)}) for n in ("a", "b")]
    many, few = (recipe.traffic(layout, 4).bytes for layout in layouts)
    assert 4.5 < many / few < 5.5


@pytest.mark.parametrize("name", ["topk", "dgc", "gaussiank", "redsync", "sidco", "adtopk"])
def test_what_is_small_may_go_whole_and_then_nothing_is_estimated(name):
    recipe = getattr(recipes, name)(density={small: 1.0, "": 0.02})
    shapes = {"first": (9, 100), "body": (50, 60), "bias": (2000,), "last": (10, 101)}
    sent = alone(recipe, lambda r, s: {n: drawn(shape) for n, shape in shapes.items()}, steps=2)
    parts = sent.split([900, 3000, 2000, 1010])
    first, body, bias, last = (int((part != 0).sum()) for part in parts)
    assert (first, bias) == (900, 2000)
    assert body < 150 and last < 60
    with pytest.raises(ValueError, match=r"no density for parameter 'body' \(there are .*small"):
        reduce(recipes.topk(density={small: 1.0}), lambda r, s: {"body": drawn((50, 60))})


def test_no_feedback_and_dense_lists_are_data():
    recipe = recipes.adtopk(density=0.1, no_feedback=["^head"], dense=["norm"])
    assert isinstance(recipe, Route)
    grads = {"head.w": drawn((10, 20)), "body.w": drawn((10, 20)), "norm.w": drawn((3, 5))}
    state: dict = {}

    def worker(comm):
        return recipe.reduce(Bucket.of(grads, state=state, step=0), comm).mean

    mean = local.run(1, worker)[0]
    assert torch.equal(mean[400:], grads["norm.w"].reshape(-1))
    assert not any("residual" in part for part in state["slots"].get("head.w", {}).values())
    assert any("residual" in part for part in state["slots"]["body.w"].values())
    with pytest.raises(ValueError, match=r"no_feedback must be a rule .* or a list of patterns"):
        recipes.adtopk(no_feedback="head")
    with pytest.raises(ValueError, match=r"dense: .* is not a pattern"):
        recipes.adtopk(dense=["("])


def test_names_that_contain_fc_are_nothing_special():
    """The published code treats any 'fc' apart; GPT-2's mlp.c_fc is an ordinary layer here."""

    def sent(name):
        return reduce(recipes.adtopk(density=0.1), lambda r, s: {name: drawn((10, 20))})[0][0]

    assert torch.equal(sent("mlp.c_fc.weight"), sent("mlp.proj.weight"))


def embedding(rank, step, touched=5):
    """A gradient of 200 tokens of which each rank met a few."""
    grad = torch.zeros(200, 32)
    rows = torch.arange(touched) * 7 + rank
    grad[rows] = drawn((touched, 32), 10 * step + rank)
    return {"embedding.weight": grad}


def test_embedding_rows_nobody_touched_cost_nothing():
    """Bytes go with the rows that were met, not with the size of the vocabulary."""
    world, counts = 3, 8 * 2  # a size exchange with two others
    for sent, sent_bytes in reduce(recipes.adtopk(density=0.05), embedding, world=world):
        rows = (sent.view(200, 32) != 0).sum(dim=1)
        assert (rows > 0).sum() == 5
        assert sent_bytes == 2 * 8 * int(rows.sum()) + counts
    nothing = lambda rank, step: {"embedding.weight": torch.zeros(200, 32)}  # noqa: E731
    assert {b for _, b in reduce(recipes.adtopk(density=0.05), nothing, world=world)} == {counts}


def test_with_equal_counts_rows_cost_the_same_touched_or_not():
    recipe = recipes.adtopk(density=0.05, collective=AllGather())
    assert len({b for _, b in reduce(recipe, embedding, world=2)}) == 1


@pytest.mark.parametrize(("keywords", "message"), [
    ({"estimate": True}, "estimate and steps are for the flat turns.* set interleave=True"),
    ({"steps": 100}, "estimate and steps are for the flat turns.* steps=100 without it"),
    ({"interleave": (0, 1)}, "a period is two numbers of steps"),
    ({"interleave": True, "steps": 0}, "steps must be a whole number of at least 1, got 0"),
    ({"interleave": True, "steps": 9, "fraction": 2.0}, r"fraction must be in \[0, 1\]"),
    ({"interleave": True, "fraction": 0.5}, "fraction is of the training"),
    ({"interleave": 5}, "interleave must be True, False or a period, got 5"),
    ({"estimate": 2.5}, "estimate must be True, False or a first interval"),
    ({"interleave": True, "estimate": -1}, "estimate must be True, False or a first interval"),
    ({"estimate": True, "collective": AllGather()}, r"counts vary.*AllGather\(ragged=True\)"),
    ({"no_feedback": "head", "memory": "none"}, "no_feedback must be a rule"),
])  # fmt: skip
def test_bad_settings(keywords, message):
    with pytest.raises(ValueError, match=message):
        recipes.adtopk(**keywords)


def test_the_command_line_writes_it_the_same_way():
    call = "adtopk(density=0.02, interleave=(2, 1), estimate=10, rows='dim1', steps=1000)"
    written = recipes.parse(call)
    assert written == recipes.adtopk(0.02, interleave=(2, 1), estimate=10, rows="dim1", steps=1000)
    assert isinstance(written.inner.no, Alternate)
    assert written.inner.no.until == 750
