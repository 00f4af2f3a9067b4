"""The DCT in chunks, and DeMo's momentum step written out."""

from __future__ import annotations

import pytest
import torch

from thinwire import Bucket, recipes
from thinwire.comm import local
from thinwire.frames.dct import Dct, cosines
from thinwire.layout import Layout

SHAPES = {"w": (64, 96), "conv": (12, 5, 3, 3), "b": (100,), "prime": (67, 3), "s": (), "e": (0,)}


def flat_and_layout(dtype=torch.float64):
    draw = torch.Generator().manual_seed(0)
    tensors = {n: torch.randn(s, generator=draw, dtype=dtype) for n, s in SHAPES.items()}
    return torch.cat([t.reshape(-1) for t in tensors.values()]), Layout.of(tensors)


@pytest.mark.parametrize("n", [1, 2, 7, 64])
def test_the_matrix_is_orthonormal_and_scipys(n):
    rows = cosines(n, torch.zeros(0, dtype=torch.float64))
    assert torch.allclose(rows @ rows.T, torch.eye(n, dtype=torch.float64), atol=1e-12)
    fft = pytest.importorskip("scipy.fft")
    x = torch.randn(n, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    expected = torch.from_numpy(fft.dct(x.numpy(), type=2, norm="ortho"))
    assert torch.allclose(rows @ x, expected, atol=1e-12)


@pytest.mark.parametrize("chunk", [1, 8, 64])
def test_there_and_back(chunk):
    flat, layout = flat_and_layout()
    basis = Dct(chunk)
    coefficients = basis.forward(flat, layout)
    assert torch.allclose(basis.back(coefficients, layout), flat, atol=1e-12)
    assert float(coefficients.norm()) == pytest.approx(float(flat.norm())), "lengths are kept"
    assert basis.layout(layout).numel == layout.numel


def test_a_chunk_is_the_two_dimensional_transform():
    fft = pytest.importorskip("scipy.fft")
    x = torch.randn(16, 24, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    layout = Layout.of({"w": x})
    rows = Dct(8).forward(x.reshape(-1), layout).view(6, 64)
    expected = fft.dctn(x[8:16, 16:24].numpy(), type=2, norm="ortho")
    assert torch.allclose(rows[5].view(8, 8), torch.from_numpy(expected), atol=1e-12)


def test_demo_is_decoupled_momentum():
    """m = beta m + g; q = the largest coefficients of every chunk of m; m -= q; send q."""
    recipe = recipes.demo_dct(density=0.125, chunk=4, decay=0.9)
    grads = [torch.randn(8, 8, generator=torch.Generator().manual_seed(s)) for s in range(5)]

    def worker(comm):
        state: dict = {}
        return [
            recipe.reduce(Bucket.of({"w": g}, state=state, step=s), comm).mean.view(8, 8).clone()
            for s, g in enumerate(grads)
        ]

    c = cosines(4, torch.zeros(0))
    momentum = torch.zeros(8, 8)
    for g, mean in zip(grads, local.run(1, worker)[0], strict=True):
        momentum = 0.9 * momentum + g
        sent = torch.zeros(8, 8)
        for i in (0, 4):
            for j in (0, 4):
                block = c @ momentum[i : i + 4, j : j + 4] @ c.T
                kept = torch.zeros(16)
                best = block.reshape(-1).abs().topk(2).indices
                kept[best] = block.reshape(-1)[best]
                sent[i : i + 4, j : j + 4] = c.T @ kept.view(4, 4) @ c
        assert torch.allclose(mean, sent, atol=1e-5)
        momentum = momentum - sent


def test_a_smooth_gradient_needs_few_coefficients():
    x = torch.sin(torch.linspace(0, 3, 64))[:, None] * torch.cos(torch.linspace(0, 2, 64))

    def left(recipe):
        def worker(comm):
            bucket = Bucket.of({"w": x}, state={}, step=0)
            return recipe.reduce(bucket, comm).mean

        return float((local.run(1, worker)[0] - x.reshape(-1)).norm() / x.norm())

    assert left(recipes.demo_dct(density=0.01)) < 0.1 < left(recipes.topk(density=0.01))


def test_what_has_no_chunks_stays_dense():
    """A prime longer than a chunk: pairs of index and value would be twice the dense bytes."""
    recipe = recipes.demo_dct(density=0.01)
    dense = recipes.dense()
    prime, even = (Layout.of({"b": torch.empty(n)}) for n in (997, 1024))
    assert recipe.traffic(prime, 4) == dense.traffic(prime, 4)
    assert recipe.traffic(even, 4).bytes < dense.traffic(even, 4).bytes / 10


def test_a_density_that_falls_is_not_judged_by_its_first_value():
    """What a ramp sends whole at first must still be compressed later."""
    layout = Layout.of({"w": torch.empty(64, 64)})
    for name in ("demo_dct", "adtopk"):
        recipe = getattr(recipes, name)(density=lambda step: 1.0 if step == 0 else 0.01)
        late, always = (r.traffic(layout, 4, step=9) for r in (recipe, recipes.dense()))
        assert late.bytes < always.bytes / 10, name


def test_bad_chunk():
    with pytest.raises(ValueError, match="chunk must be a whole number of at least 1"):
        recipes.demo_dct(chunk=0)
