"""Sparse sums and lists of positions on the CPU: to the bit what the reference returns."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.test_select import draw
from thinwire.kernels import finite
from thinwire.kernels.cpu import sparse
from thinwire.kernels.reference import sparse as reference


def test_more_threads_write_the_same():
    threads = torch.get_num_threads()
    runs = ((5, 400_000), (400_020, 1_000_000))
    index = torch.cat([torch.arange(*run, 97) for run in runs] * 2)
    value = draw(index.numel())
    mine, theirs = torch.ones(1_000_003), torch.ones(1_000_003)
    try:
        torch.set_num_threads(3)
        peak = sparse.filled(mine, runs, index, value, 0.5)
        assert peak >= reference.filled(theirs, runs, index, value, 0.5)
        assert torch.equal(mine, theirs)
        with pytest.raises(IndexError, match="outside"):
            sparse.filled(mine, runs, torch.tensor([400_010]), torch.ones(1), 1.0)
        assert finite(theirs)
        theirs[999_999] = float("nan")
        assert not finite(theirs)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("world", [1, 2, 5])
def test_sparse_sums(world):
    n = 5000
    parts = [torch.randperm(n, generator=torch.Generator().manual_seed(r)) for r in range(world)]
    parts = [part[: 300 * r].sort().values for r, part in enumerate(parts, start=world > 1)]
    values = [draw(part.numel(), seed=r) for r, part in enumerate(parts)]
    for mine, theirs in zip(
        sparse.merged(parts, values), reference.merged(parts, values), strict=True
    ):
        assert torch.equal(mine, theirs)
    index, value = torch.cat(parts), torch.cat(values)
    assert torch.equal(sparse.gather(draw(n), index), draw(n)[index])
    for alpha in (1.0, -1.0, 1 / 3):
        mine = sparse.scatter_add(draw(n), index, value, alpha)
        assert torch.equal(mine, reference.scatter_add(draw(n), index, value, alpha))


def test_lists_of_indices():
    """Ascending or not, inside or not; members, also of nothing; flags."""
    index = torch.arange(0, 900, 3)
    for some, numel in ((index, 900), (index, 897), (index.flip(0), 900), (index - 1, 900),
                        (torch.tensor([1, 1]), 5), (index[:0], 0)):  # fmt: skip
        assert sparse.ascending(some, numel) == reference.ascending(some, numel)
    for others in (torch.arange(0, 900, 2), index[:0], index[5:9], index + 1):
        assert torch.equal(sparse.member(index, others), reference.member(index, others))
        assert torch.equal(sparse.member(others, index), reference.member(others, index))
    values = draw(300)
    for kept in (values > 0, values > 99, values < 99):
        pairs = zip(sparse.compress(index, values, kept), (index[kept], values[kept]), strict=True)
        assert all(torch.equal(mine, theirs) for mine, theirs in pairs)


@pytest.mark.parametrize("n", [1, 100, 50_000])
def test_a_mean_is_written_in_one_go(n):
    """Several payloads one after the other, some of them empty, into a buffer full of rubbish."""
    parts = [torch.arange(min(r, n), n, 7 + r) for r in range(4)]
    index = torch.cat(parts)
    value = draw(index.numel())
    all_of_it = ((0, n),)
    expected = reference.scatter_add(torch.zeros(n), index, value, 0.25)
    for kernel in (sparse, reference):
        out = torch.full((n,), 9.0)
        peak = kernel.filled(out, all_of_it, index, value, 0.25)
        assert torch.equal(out, expected)
        assert expected.abs().max() <= peak <= 0.25 * value.abs().max() * 4
    out = torch.ones(n)
    assert sparse.filled(out, all_of_it, index[:0], value[:0], 1.0) == 0 and not out.any()
    with pytest.raises(IndexError, match="outside"):
        sparse.filled(torch.ones(n), all_of_it, torch.tensor([n]), torch.ones(1), 1.0)
    with pytest.raises(IndexError, match="outside"):
        sparse.filled(torch.ones(n), ((0, n + 1),), index[:0], value[:0], 1.0)


@pytest.mark.parametrize("first", range(17))
def test_a_mean_leaves_the_gaps_alone(first):
    """Wherever a run begins and ends in a line of cache."""
    runs = ((first, 20_000 + first), (20_031, 40_000 - first))
    index = torch.cat([torch.arange(*run, 9) for run in runs] * 2)
    value = draw(index.numel())
    mine, theirs = torch.full((40_005,), 9.0), torch.full((40_005,), 9.0)
    sparse.filled(mine, runs, index, value, 0.5)
    reference.filled(theirs, runs, index, value, 0.5)
    assert torch.equal(mine, theirs)
    assert (mine[:first] == 9).all() and (mine[20_000 + first : 20_031] == 9).all()
    assert (mine[40_000 - first :] == 9).all()
    for stray in (20_000 + first, 20_030, 40_000):  # another branch's: nothing of ours goes there
        with pytest.raises(IndexError, match="outside"):
            sparse.filled(mine, runs, torch.tensor([stray]), torch.ones(1), 1.0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 3e38])
def test_a_mean_that_is_not_finite_has_no_peak(bad):
    """3e38 twice is one overflow; a later finite entry does not hide it."""
    index, value = torch.tensor([3, 7, 3, 7]), torch.tensor([bad, 1.0, bad, 1.0])
    for kernel in (sparse, reference):
        assert kernel.filled(torch.ones(9), ((0, 9),), index, value, 1.0) == float("inf")


def test_nothing_is_written_outside():
    out = torch.zeros(10)
    for wrong in (-1, 10):
        with pytest.raises(IndexError, match="outside the 10 entries"):
            sparse.scatter_add(out, torch.tensor([3, wrong]), torch.ones(2))
        with pytest.raises(IndexError, match="outside the 10 entries"):
            sparse.gather(out, torch.tensor([3, wrong]))
    assert not out.any()
