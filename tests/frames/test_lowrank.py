"""Low rank against the textbook: Vogels et al. 2019, algorithm 1 and 2, and ACP-SGD's section 3."""

from __future__ import annotations

import pytest
import torch

from thinwire import Bucket, recipes
from thinwire.comm import local
from thinwire.comm.metered import Metered
from thinwire.frames.lowrank import LowRank, orthonormal
from thinwire.layout import Layout, shared_seed
from thinwire.reducers import Project

N, M, RANK = 12, 20, 3


def matrices(step: int, world: int, n: int = N, m: int = M) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(step)
    return [torch.randn(n, m, generator=draw) for _ in range(world)]


def ours(recipe, steps: int, world: int, n: int = N, m: int = M) -> list[torch.Tensor]:
    states = [{} for _ in range(world)]

    def worker(comm):
        means = []
        for step in range(steps):
            grads = {"w": matrices(step, world, n, m)[comm.rank]}
            bucket = Bucket.of(grads, state=states[comm.rank], step=step)
            means.append(recipe.reduce(bucket, comm).mean.view(n, m).clone())
        return means

    return local.run(world, worker)[0]


def first_q() -> torch.Tensor:
    draw = torch.Generator().manual_seed(shared_seed(0, 0, "w"))
    return torch.randn(M, RANK, generator=draw).double()


def gram_schmidt(matrix: torch.Tensor) -> torch.Tensor:
    columns: list[torch.Tensor] = []
    for column in matrix.T:
        for done in columns:
            column = column - (column @ done) * done
        columns.append(column / column.norm())
    return torch.stack(columns, dim=1)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_powersgd_is_the_textbook(world):
    """P = mean(M Q), orthogonalise, Q = mean(M^T P); errors are local."""
    q = first_q()
    errors = [torch.zeros(N, M, dtype=torch.float64) for _ in range(world)]
    expected = []
    for step in range(6):
        deltas = [g.double() + e for g, e in zip(matrices(step, world), errors, strict=True)]
        p = gram_schmidt(sum(d @ q for d in deltas) / world)
        mine = [d.T @ p for d in deltas]
        q = sum(mine) / world
        errors = [d - p @ local_q.T for d, local_q in zip(deltas, mine, strict=True)]
        expected.append(p @ q.T)
    for got, want in zip(ours(recipes.powersgd(rank=RANK), 6, world), expected, strict=True):
        assert (got - want).abs().max() < 1e-4


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_acpsgd_is_the_textbook(world):
    """Even steps average P against a fixed Q, odd steps the other way round."""
    p, q = torch.zeros(N, RANK, dtype=torch.float64), first_q()
    errors = [torch.zeros(N, M, dtype=torch.float64) for _ in range(world)]
    expected = []
    for step in range(6):
        deltas = [g.double() + e for g, e in zip(matrices(step, world), errors, strict=True)]
        if step % 2 == 0:
            q = gram_schmidt(q)
            mine = [d @ q for d in deltas]
            p = sum(mine) / world
            errors = [d - m @ q.T for d, m in zip(deltas, mine, strict=True)]
        else:
            p = gram_schmidt(p)
            mine = [d.T @ p for d in deltas]
            q = sum(mine) / world
            errors = [d - p @ m.T for d, m in zip(deltas, mine, strict=True)]
        expected.append(p @ q.T)
    for got, want in zip(ours(recipes.acpsgd(rank=RANK), 6, world), expected, strict=True):
        assert (got - want).abs().max() < 1e-4


@pytest.mark.parametrize(("n", "m"), [(8, 8), (8, 13), (13, 8), (1, 9), (9, 1)])
def test_powersgd_at_full_rank_is_dense(n, m):
    recipe = recipes.powersgd(rank=min(n, m), min_saving=0.0)  # factor even where it cannot pay
    assert is_factored(recipe, n, m)
    for step, got in enumerate(ours(recipe, 4, 3, n, m)):
        assert (got - sum(matrices(step, 3, n, m)) / 3).abs().max() < 1e-5


def test_acpsgd_at_full_rank_is_dense_for_square_matrices():
    recipe = recipes.acpsgd(rank=9, min_saving=0.0)
    assert is_factored(recipe, 9, 9)
    for step, got in enumerate(ours(recipe, 4, 3, 9, 9)):
        assert (got - sum(matrices(step, 3, 9, 9)) / 3).abs().max() < 1e-5


def is_factored(recipe, n, m):
    """Whether the basis of an n x m matrix is kept for the next step."""
    state: dict = {}
    bucket = Bucket.of({"w": torch.randn(n, m)}, state=state)
    local.run(1, lambda comm: recipe.reduce(bucket, comm))
    return any("basis" in part for part in state.get("slots", {}).get("w", {}).values())


@pytest.mark.parametrize(("make", "rank", "saving", "factored"), [
    # factors of 9 x 9: 18 entries a column; a step of ACP-SGD sends half of them, 81 are dense
    (recipes.acpsgd, 8, 1.0, True),
    (recipes.acpsgd, 9, 1.0, False),
    (recipes.powersgd, 4, 1.0, True),
    (recipes.powersgd, 5, 1.0, False),
    # as many times smaller as the caller asks for
    (recipes.acpsgd, 4, 2.2, True),
    (recipes.acpsgd, 4, 2.3, False),
    (recipes.powersgd, 2, 2.2, True),
    (recipes.powersgd, 2, 2.3, False),
    (recipes.acpsgd, 9, 0.9, True),
    (recipes.powersgd, 9, 0.4, True),
])  # fmt: skip
def test_a_matrix_is_factored_if_that_saves_enough(make, rank, saving, factored):
    recipe = make(rank=rank, min_saving=saving)
    assert is_factored(recipe, 9, 9) == factored


def test_the_result_does_not_depend_on_how_the_batch_is_split():
    """One worker with the mean gradient or four with parts of it: same step (epfml issue 2)."""

    def run(world, parts):
        states = [{} for _ in range(world)]

        def worker(comm):
            for step in range(4):
                grads = {"w": parts(step)[comm.rank].double()}
                bucket = Bucket.of(grads, state=states[comm.rank], step=step)
                mean = recipes.acpsgd(rank=RANK).reduce(bucket, comm).mean
            return mean

        return local.run(world, worker)[0]

    four = run(4, lambda step: matrices(step, 4))
    one = run(1, lambda step: [sum(m.double() for m in matrices(step, 4)) / 4])
    assert (four - one).abs().max() < 1e-12


def test_one_all_reduce_a_bucket_for_acpsgd_two_for_powersgd():
    grads = {"w": torch.randn(30, 40), "b": torch.randn(30), "v": torch.randn(20, 50)}

    def rounds(recipe):
        def worker(comm):
            meter = Metered(comm)
            recipe.reduce(Bucket.of(grads, state={}), meter)
            return meter.rounds

        return local.run(3, worker)[0]

    assert rounds(recipes.acpsgd(rank=2)) == 1
    assert rounds(recipes.powersgd(rank=2)) == 2


def test_what_would_not_shrink_rides_dense():
    frame = LowRank(rank=4, rounds=2)
    layout = Layout.of(
        {"small": torch.empty(5, 5), "big": torch.empty(50, 50), "b": torch.empty(9)}
    )
    assert frame.sizes(layout, 0) == [[200], [200, 25, 9]]


def test_bases_are_seeded_by_name():
    def basis(seed, name):
        state: dict = {}
        recipe = Project(frame=LowRank(rank=2, seed=seed))
        bucket = Bucket.of({name: torch.ones(20, 30)}, state=state)
        return local.run(1, lambda comm: recipe.reduce(bucket, comm))[0].mean

    torch.manual_seed(1)
    one = basis(0, "w")
    torch.manual_seed(2)
    assert torch.equal(one, basis(0, "w"))
    assert not torch.equal(one, basis(0, "v"))
    assert not torch.equal(one, basis(1, "w"))


def test_a_vanished_gradient_keeps_the_basis():
    state: dict = {}
    recipe = recipes.acpsgd(rank=2)
    for step, grad in enumerate([torch.randn(20, 30), torch.zeros(20, 30)]):
        if step == 1:
            state["slots"]["w"]["memory"]["residual"].zero_()
            before = dict(state["slots"]["w"]["frame"])
        bucket = Bucket.of({"w": grad}, state=state, step=step)
        local.run(1, lambda comm, bucket=bucket: recipe.reduce(bucket, comm))
    assert state["slots"]["w"]["frame"] == before


@pytest.mark.parametrize("scale", [1e30, 1.0, 1e-30, 0.0])
def test_orthonormal(scale):
    matrix = torch.randn(12, 3) * scale
    matrix[:, 2] = matrix[:, 0]
    basis = orthonormal(matrix)
    assert (basis.T @ basis - torch.eye(3)).abs().max() < 1e-5


def test_matrices_keep_their_channels_in_channels_last():
    """Low rank of a channels_last weight is that of the weight, not of a scrambled matrix."""
    left, right = torch.randn(6, 1), torch.randn(1, 36)
    weight = (left @ right).view(6, 4, 3, 3)
    for tensor in (weight, weight.to(memory_format=torch.channels_last)):
        state: dict = {}
        for step in range(3):
            bucket = Bucket.of({"w": tensor}, state=state, step=step)
            slot = bucket.layout.slots[0]
            recipe = recipes.powersgd(rank=1)
            mean = local.run(1, lambda comm, b=bucket, r=recipe: r.reduce(b, comm))[0].mean
            assert (slot.view(mean) - weight).abs().max() < 1e-5
