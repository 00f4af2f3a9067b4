"""Products with a few columns: Numba's against plain torch, in double precision."""

from __future__ import annotations

import pytest
import torch

from thinwire import kernels
from thinwire.kernels.cpu import matrix as fast
from thinwire.kernels.reference import matrix as reference

SHAPES = [
    (1, 1, 1), (5, 3, 2), (64, 33, 4), (7, 1000, 5), (1027, 260, 15), (40, 30, 16), (0, 4, 2),
    (4, 0, 2),
]  # fmt: skip
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)


def draw(rows: int, columns: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def near(got: torch.Tensor, exact: torch.Tensor) -> None:
    assert got.dtype == torch.float32 and got.shape == exact.shape
    assert torch.allclose(got.double(), exact, rtol=1e-5, atol=1e-4)


@shapes
def test_projections(shape):
    n, m, r = shape
    x, right, left = draw(n, m, 0), draw(m, r, 1), draw(n, r, 2)
    for basis in (right, draw(r, m, 1).T):  # a basis from QR lies by columns
        near(fast.project(x, basis), reference.project(x.double(), basis.double()))
    for basis in (left, draw(r, n, 2).T):
        near(fast.project_back(x, basis), reference.project_back(x.double(), basis.double()))


@shapes
@pytest.mark.parametrize("alpha", [None, 1.0, -1.0, 0.25])
def test_outer_products_are_added_or_written(shape, alpha):
    n, m, r = shape
    out, p, q = draw(n, m, 0), draw(r, n, 1).T, draw(m, r, 2)
    exact = reference.add_outer(out.double(), p.double(), q.double(), alpha)
    assert fast.add_outer(out, p, q, alpha) is out
    near(out, exact)


def test_what_is_not_finite_is_seen():
    x, basis = draw(50, 40, 0), draw(40, 4, 1)
    x[3, 5] = float("nan")
    assert not fast.project(x, basis).isfinite().all()
    assert not fast.project_back(x, draw(50, 4, 2)).isfinite().all()


def test_threads_give_the_same_outer_product_and_nearly_the_same_sums():
    x, p, q = draw(3000, 500, 0), draw(3000, 4, 1), draw(500, 4, 2)
    one = [fast.add_outer(x.clone(), p, q, -1.0), fast.project_back(x, p), fast.project(x, q)]
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        two = [fast.add_outer(x.clone(), p, q, -1.0), fast.project_back(x, p), fast.project(x, q)]
    finally:
        torch.set_num_threads(before)
    assert torch.equal(one[0], two[0]) and torch.equal(one[2], two[2])
    assert torch.allclose(one[1], two[1], atol=1e-3)


def test_other_precisions_are_served_by_plain_torch():
    x, basis = draw(20, 10, 0).double(), draw(10, 3, 1)
    assert kernels.project(x, basis.double()).dtype == torch.float64
    assert torch.equal(kernels.project(x, basis.double()), x @ basis.double())
    y = draw(20, 10, 0)
    assert kernels.add_outer(y, draw(20, 3, 1).double(), draw(10, 3, 2).double(), 1.0) is y
