"""What every recipe promises, at every world size, on a laptop: the conservation law and the rest.

A recipe is in the suite or the suite fails. Warm-up is 0, and each case asserts that the compressed
path ran: fewer entries than dense, or rounding.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from thinwire import Bucket, recipes
from thinwire.comm import local
from thinwire.comm.metered import Metered
from thinwire.protocols import Reducer

WORLDS = (1, 2, 3, 4, 5, 8)
# The same worlds where a case costs more: the fast suite takes three of them.
MOST_WORLDS = [w if w in (1, 3, 4) else pytest.param(w, marks=pytest.mark.slow) for w in WORLDS]
SHAPES = {
    "a.weight": (24, 40),
    "a.bias": (24,),
    "conv.weight": (6, 4, 3, 3),
    "scale": (),
    "e": (0,),
}
NUMEL = sum(torch.Size(shape).numel() for shape in SHAPES.values())
# Recipes that keep no residual by design: the second half of the law does not apply to them.
WITHOUT_MEMORY = {"dense", "half", "bf16"}

CASES: dict[str, Reducer] = {
    "dense": recipes.dense(),
    "half": recipes.half(),
    "half(memory)": recipes.half(memory="residual"),
    "bf16": recipes.bf16(),
    "bf16(memory)": recipes.bf16(memory="residual"),
    "randomk": recipes.randomk(density=0.05),
    "topk": recipes.topk(density=0.05),
    "topk(fp16)": recipes.topk(density=0.05, wire="fp16"),
    "topk(bf16)": recipes.topk(density=0.05, wire="bf16"),
    "topk(no memory)": recipes.topk(density=0.05, memory="none"),
    "adtopk": recipes.adtopk(density=0.05),
    "adtopk(dim1)": recipes.adtopk(density=0.05, rows="dim1"),
    "adtopk(dim0)": recipes.adtopk(density=0.05, rows="dim0"),
    "adtopk(longer)": recipes.adtopk(density=0.05, rows="longer"),
    "adtopk(all sparse)": recipes.adtopk(density=0.05, dense=None),
    "adtopk(no memory)": recipes.adtopk(density=0.05, memory="none"),
    "powersgd": recipes.powersgd(rank=2),
    "powersgd(bf16)": recipes.powersgd(rank=2, wire="bf16"),
    "acpsgd": recipes.acpsgd(rank=2),
    "acpsgd(fp16)": recipes.acpsgd(rank=2, wire="fp16"),
}

BUCKETS: dict[str, Callable[[Tensor], Tensor]] = {
    "gaussian": lambda x: x,
    "zero": torch.zeros_like,
    "constant": torch.ones_like,
    "huge": lambda x: x.sign() * 1e37,
    "denormal": lambda x: x * 1e-40,
    "mixed": lambda x: x * 10.0 ** (x * 6),
}


@dataclass
class Outcome:
    """What one rank saw in one step."""

    x: Tensor
    mean: Tensor
    sent: Tensor
    residual: Tensor | None
    entries: int
    finite: bool
    metered: Any
    priced: Any


def gradients(rank: int, step: int, kind: str, shapes: dict[str, Any]) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(1000 * step + rank)
    make = BUCKETS[kind]
    return {name: make(torch.randn(shape, generator=draw)) for name, shape in shapes.items()}


def residual_of(state: dict[str, Any], shapes: dict[str, Any]) -> Tensor | None:
    parts = [state.get("slots", {}).get(name, {}).get("memory", {}) for name in shapes]
    if not any("residual" in part for part in parts):
        return None
    return torch.cat([part["residual"].reshape(-1) for part in parts])


def take_step(
    recipe: Reducer, world: int, states: list[dict[str, Any]], step: int, kind: str = "gaussian",
    shapes: dict[str, Any] = SHAPES,
) -> list[Outcome]:  # fmt: skip
    def worker(comm: Any) -> Outcome:
        state = states[comm.rank]
        bucket = Bucket.of(gradients(comm.rank, step, kind, shapes), state=state, step=step)
        assert isinstance(bucket.flat, Tensor)
        before = residual_of(state, shapes)
        x = bucket.flat + (before if before is not None else 0)
        meter = Metered(comm)
        reduced = recipe.reduce(bucket, meter)
        return Outcome(
            x=x.clamp(-torch.finfo().max, torch.finfo().max),
            mean=reduced.mean.clone(),
            sent=reduced.sent.add_into(torch.zeros(bucket.layout.numel)),
            residual=residual_of(state, shapes),
            entries=reduced.sent.entries,
            finite=reduced.finite,
            metered=meter.traffic,
            priced=recipe.traffic(bucket.layout, world, step),
        )

    return local.run(world, worker)


def close(a: Tensor, b: Tensor, scale: Tensor, tolerance: float = 1e-6) -> bool:
    """Equal to 1e-6 of the largest number involved, or to the grain of denormal numbers."""
    limit = tolerance * float(scale.double().abs().max()) + 1e-42 if scale.numel() else 0.0
    return bool(((a.double() - b.double()).abs() <= limit).all())


def test_no_recipe_is_missing() -> None:
    assert {case.split("(")[0] for case in CASES} == set(recipes.names())


@pytest.mark.parametrize("kind", BUCKETS)
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("case", CASES)
def test_the_law(case: str, world: int, kind: str) -> None:
    """Same mean on all ranks, mean == average of sent, x == sent + residual, bytes as priced."""
    recipe = CASES[case]
    states: list[dict[str, Any]] = [{} for _ in range(world)]
    for step in range(5 if kind == "gaussian" else 3):
        outcomes = take_step(recipe, world, states, step, kind)
        mean = outcomes[0].mean
        sizes = torch.cat([o.x for o in outcomes])
        assert all(torch.equal(o.mean, mean) for o in outcomes)
        assert all(o.finite for o in outcomes)
        average = sum(o.sent.double() for o in outcomes) / world
        assert close(mean, average, sizes)
        # A low-rank basis that saw nothing but zeros stays on its side, which prices cannot know.
        flushed = kind == "denormal" and case == "powersgd(bf16)"
        vanished = "sgd" in case and not mean.any()
        assert all(o.metered == o.priced for o in outcomes) or vanished or flushed
        for o in outcomes:
            if o.residual is None:
                assert case.split("(")[0] in WITHOUT_MEMORY or "no memory" in case
            else:
                assert o.residual.isfinite().all()
                assert close(o.x, o.sent.double() + o.residual.double(), o.x)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES)
def test_the_law_in_other_precisions(case: str, dtype: torch.dtype) -> None:
    """16-bit gradients are summed and remembered in 32 bits; double stays double."""
    states: list[dict[str, Any]] = [{} for _ in range(4)]
    for step in range(3):

        def worker(comm: Any, step: int = step) -> tuple[Tensor, Tensor]:
            grads = gradients(comm.rank, step, "gaussian", SHAPES)
            grads = {name: g.to(dtype) for name, g in grads.items()}
            bucket = Bucket.of(grads, state=states[comm.rank], step=step)
            reduced = CASES[case].reduce(bucket, comm)
            assert reduced.finite
            wide = torch.float64 if dtype == torch.float64 else torch.float32
            return reduced.mean, reduced.sent.add_into(torch.zeros(NUMEL, dtype=wide))

        results = local.run(4, worker)
        assert all(torch.equal(mean, results[0][0]) for mean, _ in results)
        average = sum(sent.double() for _, sent in results) / 4
        # dense is DDP's own sum, in the gradient's own type
        native = case == "dense" and dtype != torch.float64
        exact = 1e-13 if dtype == torch.float64 and "16" not in case else 1e-6
        assert (results[0][0].double() - average).abs().max() <= (0.05 if native else exact)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("case", [c for c in CASES if c != "dense"])
def test_the_compressed_path_ran(case: str, world: int) -> None:
    states: list[dict[str, Any]] = [{} for _ in range(world)]
    outcomes = take_step(CASES[case], world, states, 0)
    rounded = any(not torch.equal(o.sent, o.x) for o in outcomes)
    fewer = all(o.entries < NUMEL for o in outcomes)
    assert rounded
    assert fewer or case.split("(")[0] in ("half", "bf16")


def budget(case: str) -> int | None:
    """How many entries a density of 5 % keeps, by each recipe's own rule."""
    sizes = {name: torch.Size(shape).numel() for name, shape in SHAPES.items()}
    rows = {"dim1": (24, 54), "dim0": (40, 36), "longer": (24, 36)}
    if case.startswith(("topk", "randomk")):
        return sum(max(1, int(0.05 * n + 0.5)) for n in sizes.values() if n)
    if case.startswith("adtopk"):
        a_rows, conv_rows = next((r for key, r in rows.items() if key in case), (24, 6))
        kept = max(a_rows, 48) + max(conv_rows, 11)
        return kept + (1 + 1 if "all sparse" in case else 24 + 1)
    return None


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("case", [c for c in CASES if budget(c)])
def test_density_is_respected(case: str, world: int) -> None:
    states: list[dict[str, Any]] = [{} for _ in range(world)]
    for step in range(3):
        assert {o.entries for o in take_step(CASES[case], world, states, step)} == {budget(case)}


@pytest.mark.parametrize("case", CASES)
def test_bytes_are_fewer_than_dense(case: str) -> None:
    states: list[dict[str, Any]] = [{} for _ in range(4)]
    dense = take_step(CASES["dense"], 4, states, 0)[0].metered.bytes
    mine = take_step(CASES[case], 4, [{} for _ in range(4)], 0)[0].metered.bytes
    assert mine == dense if case == "dense" else mine < dense


@pytest.mark.parametrize("world", MOST_WORLDS)
@pytest.mark.parametrize("case", CASES)
def test_deterministic(case: str, world: int) -> None:
    def run() -> list[Tensor]:
        states: list[dict[str, Any]] = [{} for _ in range(world)]
        return [take_step(CASES[case], world, states, step)[0].mean for step in range(4)]

    torch.manual_seed(1)
    first = run()
    before = torch.get_rng_state()
    torch.manual_seed(2)
    assert all(torch.equal(a, b) for a, b in zip(first, run(), strict=True))
    torch.manual_seed(1)
    assert torch.equal(before, torch.get_rng_state()), "a recipe touched the global RNG"


@pytest.mark.parametrize("world", MOST_WORLDS)
@pytest.mark.parametrize("case", CASES)
def test_state_round_trip(case: str, world: int) -> None:
    """Saved and loaded with weights_only=True, a run goes on with the same bits."""
    states: list[dict[str, Any]] = [{} for _ in range(world)]
    for step in range(3):
        take_step(CASES[case], world, states, step)
    buffer = io.BytesIO()
    torch.save(states, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=True)
    copied = copy.deepcopy(states)
    for step in range(3, 6):
        means = [take_step(CASES[case], world, s, step)[0].mean for s in (states, loaded, copied)]
        assert torch.equal(means[0], means[1])
        assert torch.equal(means[0], means[2])


@pytest.mark.parametrize("case", CASES)
def test_sign_flip_symmetry(case: str) -> None:
    def reduced(sign: float) -> Tensor:
        def worker(comm: Any) -> Tensor:
            grads = {n: sign * g for n, g in gradients(comm.rank, 0, "gaussian", SHAPES).items()}
            return CASES[case].reduce(Bucket.of(grads, state={}, step=0), comm).mean

        return local.run(3, worker)[0]

    assert torch.equal(reduced(1.0), -reduced(-1.0))


@pytest.mark.parametrize("shapes", [{}, {"e": (0,)}, {"one": (1,)}, {"one": (1, 1)}, {"s": ()}])
@pytest.mark.parametrize("world", MOST_WORLDS)
@pytest.mark.parametrize("case", CASES)
def test_tiny_buckets(case: str, world: int, shapes: dict[str, Any]) -> None:
    states: list[dict[str, Any]] = [{} for _ in range(world)]
    for step in range(3):
        outcomes = take_step(CASES[case], world, states, step, shapes=shapes)
        average = sum(o.sent.double() for o in outcomes) / world
        assert close(outcomes[0].mean, average, torch.cat([o.x for o in outcomes]))
        assert all(torch.equal(o.mean, outcomes[0].mean) for o in outcomes)
        for o in outcomes:
            if o.residual is not None:
                assert close(o.x, o.sent.double() + o.residual.double(), o.x)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("case", CASES)
def test_a_non_finite_gradient_is_seen_by_all_and_kept_by_none(case: str, bad: float) -> None:
    recipe = CASES[case]
    states: list[dict[str, Any]] = [{} for _ in range(3)]
    take_step(recipe, 3, states, 0)
    before = [residual_of(state, SHAPES) for state in states]
    before = [None if r is None else r.clone() for r in before]

    def worker(comm: Any) -> tuple[bool, Tensor, int]:
        grads = gradients(comm.rank, 1, "gaussian", SHAPES)
        if comm.rank == 1:
            grads["a.weight"][3, 5] = bad
        bucket = Bucket.of(grads, state=states[comm.rank], step=1)
        reduced = recipe.reduce(bucket, comm)
        return reduced.finite, reduced.mean.clone(), reduced.sent.entries

    for finite, mean, entries in local.run(3, worker):
        assert not finite
        assert not mean.isfinite().all()
        assert entries == 0
    for rank, old in enumerate(before):
        new = residual_of(states[rank], SHAPES)
        if old is None:
            continue
        assert new is not None and new.isfinite().all()
        grads = torch.cat([g.reshape(-1) for g in gradients(rank, 1, "gaussian", SHAPES).values()])
        position = 3 * 40 + 5
        if rank == 1:
            grads[position] = 0.0
        assert torch.equal(new, old + grads), "an aborted step sends nothing: the residual is x"
    after = take_step(recipe, 3, states, 1)
    assert all(o.finite and o.mean.isfinite().all() for o in after)
