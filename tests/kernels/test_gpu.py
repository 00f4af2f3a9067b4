"""Adding, selecting and sparse sums in Triton, run by its interpreter, against the reference."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from tests.kernels.test_select import INPUTS, draw
from thinwire.kernels.gpu import select, sparse
from thinwire.kernels.reference import select as reference
from thinwire.kernels.reference import sparse as sums

SHAPES = [(1, 20_003, 200), (7, 100, 10), (3, 33, 32), (5, 1, 1), (2, 40, 50), (1, 17_000, 9_000)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", INPUTS)
def test_topk(name, shape):
    r, c, k = shape
    rows, memo = INPUTS[name](r, c), {}
    expected = reference.topk(rows, k)
    for _ in range(2):
        assert torch.equal(select.topk(rows, k, memo), expected)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_adding_and_selecting_in_one_sweep(shape):
    r, c, k = shape
    residual, memo = draw(r, c), {}
    for step in range(3):
        grad = draw(r, c, seed=10 + step)
        expected = residual + 0.5 * grad
        index, finite = select.add_topk(residual, grad, 0.5, k, memo)
        assert finite
        assert torch.equal(residual, expected)
        assert torch.equal(index, reference.topk(residual, k))


@pytest.mark.parametrize("c", [50, 20_000])
def test_what_is_not_finite_is_left_out_and_overflow_held(c):
    residual, grad = draw(1, c), draw(1, c, seed=1)
    grad[0, [1, 7, 20, 30]] = torch.tensor([float("nan"), float("inf"), -float("inf"), 3e38])
    residual[0, 30] = 2e38
    theirs = residual.clone()
    expected, clean = reference.add_topk(theirs, grad, 1.0, 5, {})
    index, finite = select.add_topk(residual, grad, 1.0, 5, {})
    assert not finite and not clean
    assert torch.equal(residual, theirs)
    assert torch.equal(index, expected)
    assert not select.accumulate(residual.view(-1), grad.view(-1))


@pytest.mark.parametrize("add", ["accumulate", "add_topk"])
def test_an_overflow_is_held_on_its_own_side(add):
    huge = torch.tensor([-3e38, 3e38]).repeat(40)
    residual = huge.clone()
    if add == "accumulate":
        select.accumulate(residual, huge)
    else:
        select.add_topk(residual[None], huge[None], 1.0, 1, {})
    assert torch.equal(residual, torch.finfo().max * huge.sign())


@pytest.mark.parametrize("edge", [0.0, 1.0, 2.5, 1e9])
def test_above(edge):
    x = draw(5000)
    x[3] = float("nan")
    count = reference.above(x, edge, 5000)[1]
    for most in (0, 100, 5000):
        found, number = select.above(x, edge, most)
        assert number == count
        if count <= most:
            assert torch.equal(found, reference.above(x, edge, most)[0])


@pytest.mark.parametrize("world", [1, 2, 4])
def test_sparse_sums(world):
    n = 3000
    parts = [torch.randperm(n, generator=torch.Generator().manual_seed(r)) for r in range(world)]
    parts = [part[: 700 * r + 1].sort().values for r, part in enumerate(parts)]
    values = [draw(part.numel(), seed=r) for r, part in enumerate(parts)]
    for mine, theirs in zip(sparse.merged(parts, values), sums.merged(parts, values), strict=True):
        assert torch.equal(mine, theirs)
    index, value = torch.cat(parts), torch.cat(values)
    mine = sparse.scatter_add(draw(n), index, value, -1.0)
    assert torch.equal(mine, sums.scatter_add(draw(n), index, value, -1.0))
    assert not sparse.scatter_add(torch.zeros(4), index[:0], value[:0]).any()
