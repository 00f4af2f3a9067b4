"""The CPU kernels return what the reference returns, to the bit, on every kind of input."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.kernels import cpu, loops, reference, rice, sparse

SHAPES = [  # rows, columns, k: flat and guessed at, row by row, tails of every length
    (1, 100_003, 1000), (1, 70_000, 1), (1, 66_000, 33_000), (1, 200_001, 150_000), (37, 1000, 10),
    (5, 31, 4), (3, 32, 31), (100, 70, 69), (4, 4096, 40), (2, 50_000, 9_000), (6, 65, 1),
    (1, 1, 1), (9, 1, 1), (3, 40, 50),
]  # fmt: skip


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def clustered(r: int, c: int) -> torch.Tensor:
    """Everything large in one corner."""
    x = 1e-3 * draw(r, c)
    x[:, : max(1, c // 50)] += 5 * draw(r, max(1, c // 50), seed=1)
    return x


def periodic(r: int, c: int) -> torch.Tensor:
    """All the large ones in the same lane: the groups' maxima tell little."""
    x = 1e-3 * draw(r, c)
    x[:, ::32] = draw(r, -(-c // 32), seed=1)
    return x


def needle(r: int, c: int) -> torch.Tensor:
    """All equal, but for one just above and one just below."""
    x = torch.ones(r, c)
    x[:, c // 2] = 1.0 + 2**-23
    x[:, c // 3] = 1.0 - 2**-24
    return x


INPUTS = {
    "random": draw,
    "heavy": lambda r, c: torch.exp(3 * draw(r, c)) * draw(r, c, seed=2).sign(),
    "tied": lambda r, c: draw(r, c).mul(2).round(),
    "zero": torch.zeros,
    "one value": lambda r, c: torch.full((r, c), -2.5),
    "sorted": lambda r, c: draw(r, c).abs().sort(dim=1).values,
    "reversed": lambda r, c: draw(r, c).abs().sort(dim=1, descending=True).values,
    "clustered": clustered,
    "periodic": periodic,
    "needle": needle,
    "tiny": lambda r, c: 1e-42 * draw(r, c).mul(100).round(),
    "organ pipe": lambda r, c: torch.arange(c).float().sub(c / 2).expand(r, c).contiguous(),
}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", INPUTS)
def test_topk(name, shape):
    r, c, k = shape
    rows = INPUTS[name](r, c)
    expected = reference.topk(rows, k)
    memo = {}
    for _ in range(3):  # sampled, then guessed, then guessed again
        assert torch.equal(cpu.topk(rows, k, memo), expected)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("alpha", [1.0, 0.37])
def test_adding_and_selecting_in_one_sweep(name, shape, alpha):
    r, c, k = shape
    residual, memo = INPUTS[name](r, c), {}
    theirs = residual.clone()
    for step in range(3):
        grad = draw(r, c, seed=10 + step) if step else torch.zeros(r, c)
        assert reference.accumulate(theirs, grad, alpha)
        index, finite = cpu.add_topk(residual, grad, alpha, k, memo)
        assert finite
        # torch multiplies and adds with one rounding where the machine can
        assert torch.equal(residual, theirs) or (
            alpha != 1 and torch.allclose(residual, theirs, atol=1e-6)
        )
        assert torch.equal(index, reference.topk(residual, k))


@pytest.mark.parametrize("shape", [(1, 100_003, 500), (7, 1003, 10), (3, 31, 5)], ids=str)
def test_what_is_not_finite_is_left_out_and_overflow_held(shape):
    r, c, k = shape
    residual, grad = draw(r, c), draw(r, c, seed=1)
    places = torch.randperm(r * c, generator=torch.Generator().manual_seed(2))[: max(4, c // 40)]
    ugly = torch.tensor([float("nan"), float("inf"), float("-inf"), 3e38])
    grad.view(-1)[places] = ugly.repeat(-(-places.numel() // 4))[: places.numel()]
    residual.view(-1)[places[3::4]] = 2e38
    theirs = residual.clone()
    expected, clean = reference.add_topk(theirs, grad, 1.0, k, {})
    index, finite = cpu.add_topk(residual, grad, 1.0, k, {})
    assert not finite and not clean
    assert torch.equal(residual, theirs)
    assert residual.isfinite().all()
    assert torch.equal(index, expected)
    again, more = residual.clone(), theirs.clone()
    assert cpu.accumulate(again, grad) == reference.accumulate(more, grad) is False
    assert torch.equal(again, more)


def test_an_overflow_alone_is_no_reason_to_abort():
    residual, grad = torch.full((1, 100), 3e38), torch.full((1, 100), 3e38)
    _, finite = cpu.add_topk(residual, grad, 1.0, 3, {})
    assert finite
    assert (residual == torch.finfo(torch.float32).max).all()


@pytest.mark.parametrize("n", [2, 62, 100_002])
def test_an_overflow_is_held_on_its_own_side(n):
    """In lanes and in what is left over after them; by `accumulate`, and with a selection."""
    huge = torch.tensor([-3e38, 3e38]).repeat(n // 2)
    held = torch.finfo().max * huge.sign()
    residual = huge.clone()
    assert cpu.accumulate(residual, huge) and torch.equal(residual, held)
    residual = huge.clone()[None]
    assert cpu.add_topk(residual, huge[None], 1.0, 1, {})[1] and torch.equal(residual[0], held)


@pytest.mark.parametrize("c", [100_000, 1000])
def test_nan_is_never_hidden(c):
    rows = draw(1, c)
    rows[0, [5, 77, c - 1]] = torch.tensor([float("nan"), float("inf"), -float("nan")])
    for k in (1, 2, 3, 50):
        assert torch.equal(cpu.topk(rows, k), reference.topk(rows, k))


@pytest.mark.parametrize("guess", [0.0, 1e-30, 0.5, 2.3, 2.5, 1e3, 1e30])
def test_a_wrong_guess_costs_two_passes_at_most_and_no_exactness(guess, monkeypatch):
    """First step, a jump of the learning rate, gradients a thousand times larger."""
    passes = []
    for name in ("sweep", "tally"):
        work = getattr(loops, name)
        monkeypatch.setattr(loops, name, lambda *a, w=work, n=name: passes.append(n) or w(*a))
    rows = draw(1, 300_000)
    memo = {"guess": guess}
    assert torch.equal(cpu.topk(rows, 3000, memo), reference.topk(rows, 3000))
    assert len(passes) <= 3
    passes.clear()
    assert torch.equal(cpu.topk(rows, 3000, memo), reference.topk(rows, 3000))
    assert passes == ["sweep"], "the next guess is a good one"


def test_a_sample_is_good_enough_for_one_pass(monkeypatch):
    monkeypatch.setattr(loops, "tally", lambda *a: pytest.fail("counted"))
    for seed in range(5):
        rows = draw(1, 1_000_000, seed=seed)
        assert torch.equal(cpu.topk(rows, 10_000, {}), reference.topk(rows, 10_000))


@settings(max_examples=150)
@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=200),
    st.data(),
)
def test_any_numbers(numbers, data):
    rows = torch.tensor(numbers)[None]
    k = data.draw(st.integers(1, len(numbers)))
    assert torch.equal(cpu.topk(rows, k), reference.topk(rows, k))
    edge = abs(data.draw(st.sampled_from(numbers)))
    found, count = cpu.above(rows[0], edge, len(numbers))
    expected, number = reference.above(rows[0], edge, len(numbers))
    assert count == number
    assert torch.equal(found, expected)


def test_more_threads_find_the_same():
    threads = torch.get_num_threads()
    flat, rows, grad = draw(1, 1_000_003), draw(3000, 500), draw(1, 1_000_003, seed=3)
    try:
        torch.set_num_threads(3)
        one, two = flat.clone(), flat.clone()
        index, _ = cpu.add_topk(one, grad, 1.0, 9_999, {})
        assert torch.equal(index, reference.add_topk(two, grad, 1.0, 9_999, {})[0])
        assert torch.equal(one, two)
        assert torch.equal(cpu.topk(rows, 7), reference.topk(rows, 7))
        assert cpu.above(flat[0], 2.0, 0)[1] == reference.above(flat[0], 2.0, 0)[1]
    finally:
        torch.set_num_threads(threads)


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
        assert cpu.finite(theirs)
        theirs[999_999] = float("nan")
        assert not cpu.finite(theirs)
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


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_finite(bad):
    for n in (1, 31, 32, 1000):
        assert cpu.finite(3e38 * torch.ones(n))
        for place in (0, n // 2, n - 1):
            x = torch.zeros(n)
            x[place] = bad
            assert not cpu.finite(x)


def test_nothing_is_written_outside():
    out = torch.zeros(10)
    for wrong in (-1, 10):
        with pytest.raises(IndexError, match="outside the 10 entries"):
            sparse.scatter_add(out, torch.tensor([3, wrong]), torch.ones(2))
        with pytest.raises(IndexError, match="outside the 10 entries"):
            sparse.gather(out, torch.tensor([3, wrong]))
    assert not out.any()


@pytest.mark.parametrize("k", [0, 1, 255, 256, 257, 5000])
@pytest.mark.parametrize("n", [5000, 2_000_000, 2**40])
def test_rice(k, n):
    draws = torch.randint(0, n, (2 * k,), generator=torch.Generator().manual_seed(k))
    for indices in (draws.unique()[:k], torch.arange(k), torch.arange(n - k, n)):
        data = rice.rice_encode(indices)
        assert torch.equal(sparse.rice_encode(indices), data)
        assert sparse.rice_size(indices) == rice.rice_size(indices) == data.numel()
        back = sparse.rice_decode(data, indices.numel(), n)
        assert back is not None
        assert torch.equal(back, indices)


@settings(max_examples=300)
@given(st.data())
def test_spoilt_codes_are_refused_alike(data):
    """What one decoder takes the other takes, and they read the same."""
    n = data.draw(st.sampled_from([40, 3000, 10**6]))
    indices = torch.tensor(sorted(data.draw(st.sets(st.integers(0, n - 1), max_size=40))))
    code = bytearray(sparse.rice_encode(indices.to(torch.int64)).tolist())
    for _ in range(data.draw(st.integers(0, 3))):
        if code:
            code[data.draw(st.integers(0, len(code) - 1))] ^= data.draw(st.integers(1, 255))
    code = code[: data.draw(st.integers(0, len(code)))] + data.draw(st.binary(max_size=2))
    spoilt = torch.tensor(list(code), dtype=torch.uint8)
    k = data.draw(st.integers(0, indices.numel() + 2))
    mine, theirs = sparse.rice_decode(spoilt, k, n), rice.rice_decode(spoilt, k, n)
    assert (mine is None) == (theirs is None)
    assert mine is None or torch.equal(mine, theirs)


def test_importing_thinwire_does_not_load_the_compiler():
    code = "import sys, thinwire; thinwire.attach; assert 'numba' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
