"""Whoever says that all that waits is sent, sends it: every recipe with a density, every nesting.

`Flushed(density, n)` asks for density 1.0 in the last step. Afterwards the residual is zero, on
exact wires to the bit; on others what is left is the rounding of that one step.
"""

from __future__ import annotations

import inspect
from dataclasses import replace

import pytest
import torch

from thinwire import Bucket, layout, recipes
from thinwire.collectives.two_level import TwoLevel
from thinwire.combinators import Remember, Watch
from thinwire.comm import local
from thinwire.memory import MomentumCorrected, Residual
from thinwire.protocols import Reducer
from thinwire.recipes.options import COLLECTIVES
from thinwire.schedule import Flushed, Piecewise, stages

STEPS = 4
SHAPES = {
    "a.weight": (13, 29),
    "a.bias": (13,),
    "conv.weight": (5, 3, 3, 3),
    "scale": (),
    "e": (0,),
}
SPARSE = [
    name
    for name in recipes.names()
    if "density" in inspect.signature(getattr(recipes, name)).parameters and name != "auto"
]
FLUSH = Flushed(0.01, STEPS)


def built(name: str, **more: object) -> Reducer:
    recipe: Reducer = getattr(recipes, name)(density=FLUSH, **more)
    return recipe


PRODUCTS = ("demo_dct", "powersgd", "acpsgd")  # of matrices, which round
RATED = Residual(learning_rate=True)
CASES = {name: built(name) for name in SPARSE}
CASES |= {
    f"topk, {name}": built("topk", collective=name) for name in COLLECTIVES if name != "two_level"
}
CASES |= {
    "gtopk(tree)": built("gtopk", tree=True),
    "dgc(loose)": built("dgc", hierarchical=False),
    "dgc(nesterov)": built("dgc", memory=MomentumCorrected(nesterov=True, learning_rate=True)),
    "threshold(high)": built("threshold", value=100.0),
    "redsync(trim)": built("redsync", trim=True),
    "adtopk(interleave, estimate)": built("adtopk", interleave=True, estimate=True),
    "adtopk(partial)": built("adtopk", partial=True),
    "adtopk(hybrid)": built("adtopk", collective="cheapest"),
    "adtopk(dim1)": built("adtopk", rows="dim1", dense=None),
    "slots(rated)": built("slots", memory=RATED),
    "spardl(decay)": built("spardl", memory=Residual(decay=0.9)),
    "topk(reused)": built("topk", refresh=3),
    "topk(by name)": recipes.topk({layout.vectors: 1.0, "": FLUSH}),
    "dgc(warmup)": built("dgc", warmup=2),
    "scheduled": built("threshold", value=stages((0.1, 5.0), 2)),
}  # fmt: skip
WHOLE = Piecewise((STEPS - 1,), (2, 64))  # the largest rank that any of its matrices has
CASES |= {
    "powersgd": recipes.powersgd(rank=WHOLE),
    "acpsgd": recipes.acpsgd(rank=WHOLE),
    "onebit": recipes.onebit(block=Piecewise((STEPS - 1,), (512, 1))),
    "signsgd": recipes.signsgd(block=Piecewise((STEPS - 1,), (512, 1))),
}
watched = recipes.slots(FLUSH)
assert isinstance(watched, Remember)
CASES["watch"] = replace(watched, inner=Watch(inner=watched.inner, probe=lambda *seen: None))


def residuals(recipe: Reducer, world: int, steps: int = STEPS) -> list[tuple[float, float]]:
    """The largest entry that waits, on each rank, before the last step and after it."""

    def worker(comm):  # type: ignore[no-untyped-def]
        state, found = {}, []
        for step in range(steps):
            draw = torch.Generator().manual_seed(10 * step + comm.rank)
            tensors = {name: torch.randn(shape, generator=draw) for name, shape in SHAPES.items()}
            bucket = Bucket.of(tensors, state=state, step=step)
            bucket.rates = dict.fromkeys(SHAPES, 0.5)
            recipe.reduce(bucket, comm)
            found.append(max(
                (float(part["residual"].abs().max()) for slot in state["slots"].values()
                 for part in slot.values() if "residual" in part and part["residual"].numel()),
            ))  # fmt: skip
        return found[-2], found[-1]

    return local.run(world, worker)


@pytest.mark.parametrize("world", [3, 4])
@pytest.mark.parametrize("case", CASES)
def test_nothing_waits_after_a_flush(case: str, world: int) -> None:
    for before, after in residuals(CASES[case], world):
        assert before > 0.5, "there was something to flush"
        assert after <= (5e-6 if case in PRODUCTS else 0.0)


@pytest.mark.parametrize("name", ["topk", "gtopk", "topkdsa", "slots", "spardl", "adtopk"])
def test_between_nodes_rounding_is_left(name: str) -> None:
    """A node's sum is taken apart again: a bit of the last place of what was added."""
    for _, after in residuals(built(name, collective=TwoLevel(nodes=2)), 4):
        assert after <= 2e-6


@pytest.mark.parametrize("case", ["slots", "gtopk", "spardl", "topk", "topkdsa", "adtopk"])
def test_a_flush_on_eight_bits_leaves_their_rounding(case: str) -> None:
    """Half a step of 1/127 of the block's largest; of the chunk that a rank owns, P times that."""
    world = 4
    found = residuals(built(case, wire="int8+auto"), world)
    largest = max(before for before, _ in found) + 4.5  # no gradient here is larger than that
    assert all(0 < after <= world * largest / 127 / 2 for _, after in found)


@pytest.mark.parametrize("n", [10, 31, 97])
@pytest.mark.parametrize("name", SPARSE)
def test_density_one_is_dense_for_any_length(name: str, n: int) -> None:
    """The same mean as `dense`, at the same price; a DCT comes back to a few bits."""
    whole: Reducer = getattr(recipes, name)(density=1.0)

    def worker(comm):  # type: ignore[no-untyped-def]
        draw = torch.Generator().manual_seed(comm.rank)
        grads = {"w": torch.randn(n, generator=draw)}
        means = []
        for step in range(2):
            for recipe in (whole, recipes.dense()):
                out = recipe.reduce(Bucket.of(grads, state={}, step=step), comm)
                means.append(out.mean.clone())
        return means

    for means in local.run(3, worker):
        for mine, dense in zip(means[::2], means[1::2], strict=True):
            assert torch.allclose(mine, dense, atol=1e-6 if name == "demo_dct" else 0.0)
    one = Bucket.of({"w": torch.zeros(n)}, state={}).layout
    for step in range(2):
        assert whole.traffic(one, 3, step) == recipes.dense().traffic(one, 3, step)


def test_auto_may_choose_what_no_flush_empties() -> None:
    with pytest.raises(ValueError, match=r"call sync\.pause\(\) before the last step"):
        recipes.auto(FLUSH)  # type: ignore[arg-type]
