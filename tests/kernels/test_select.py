"""Adding and selecting on the CPU: to the bit what the reference returns, on any input."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.kernels.cpu import select as fast
from thinwire.kernels.cpu import select_loops as loops
from thinwire.kernels.reference import select as reference

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
        assert torch.equal(fast.topk(rows, k, memo), expected)


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
        index, finite = fast.add_topk(residual, grad, alpha, k, memo)
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
    index, finite = fast.add_topk(residual, grad, 1.0, k, {})
    assert not finite and not clean
    assert torch.equal(residual, theirs)
    assert residual.isfinite().all()
    assert torch.equal(index, expected)
    again, more = residual.clone(), theirs.clone()
    assert fast.accumulate(again, grad) == reference.accumulate(more, grad) is False
    assert torch.equal(again, more)


@pytest.mark.parametrize("ugly", [False, True])
@pytest.mark.parametrize("n", [0, 5, 4096, 100_003])
def test_what_was_there_fades_before_it_is_added_to(n, ugly):
    residual, grad = draw(1, n)[0], draw(1, n, seed=1)[0]
    if ugly and n:
        grad[:: max(1, n // 7)] = float("nan")
    theirs = residual.clone()
    clean = [
        form.accumulate(x, grad, 0.5, 0.9) for form, x in ((fast, residual), (reference, theirs))
    ]
    assert clean == [not (ugly and n)] * 2
    assert torch.equal(residual, theirs)
    assert theirs.isfinite().all()


def test_an_overflow_alone_is_no_reason_to_abort():
    residual, grad = torch.full((1, 100), 3e38), torch.full((1, 100), 3e38)
    _, finite = fast.add_topk(residual, grad, 1.0, 3, {})
    assert finite
    assert (residual == torch.finfo(torch.float32).max).all()


@pytest.mark.parametrize("n", [2, 62, 100_002])
def test_an_overflow_is_held_on_its_own_side(n):
    """In lanes and in what is left over after them; by `accumulate`, and with a selection."""
    huge = torch.tensor([-3e38, 3e38]).repeat(n // 2)
    held = torch.finfo().max * huge.sign()
    residual = huge.clone()
    assert fast.accumulate(residual, huge) and torch.equal(residual, held)
    residual = huge.clone()[None]
    assert fast.add_topk(residual, huge[None], 1.0, 1, {})[1] and torch.equal(residual[0], held)


@pytest.mark.parametrize("c", [100_000, 1000])
def test_nan_is_never_hidden(c):
    rows = draw(1, c)
    rows[0, [5, 77, c - 1]] = torch.tensor([float("nan"), float("inf"), -float("nan")])
    for k in (1, 2, 3, 50):
        assert torch.equal(fast.topk(rows, k), reference.topk(rows, k))


@pytest.mark.parametrize("guess", [0.0, 1e-30, 0.5, 2.3, 2.5, 1e3, 1e30])
def test_a_wrong_guess_costs_two_passes_at_most_and_no_exactness(guess, monkeypatch):
    """First step, a jump of the learning rate, gradients a thousand times larger."""
    passes = []
    for name in ("sweep", "tally"):
        work = getattr(loops, name)
        monkeypatch.setattr(loops, name, lambda *a, w=work, n=name: passes.append(n) or w(*a))
    rows = draw(1, 300_000)
    memo = {"guess": guess}
    assert torch.equal(fast.topk(rows, 3000, memo), reference.topk(rows, 3000))
    assert len(passes) <= 3
    passes.clear()
    assert torch.equal(fast.topk(rows, 3000, memo), reference.topk(rows, 3000))
    assert passes == ["sweep"], "the next guess is a good one"


def test_a_sample_is_good_enough_for_one_pass(monkeypatch):
    monkeypatch.setattr(loops, "tally", lambda *a: pytest.fail("counted"))
    for seed in range(5):
        rows = draw(1, 1_000_000, seed=seed)
        assert torch.equal(fast.topk(rows, 10_000, {}), reference.topk(rows, 10_000))


@settings(max_examples=150)
@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=200),
    st.data(),
)
def test_any_numbers(numbers, data):
    rows = torch.tensor(numbers)[None]
    k = data.draw(st.integers(1, len(numbers)))
    assert torch.equal(fast.topk(rows, k), reference.topk(rows, k))
    edge = abs(data.draw(st.sampled_from(numbers)))
    found, count = fast.above(rows[0], edge, len(numbers))
    expected, number = reference.above(rows[0], edge, len(numbers))
    assert count == number
    assert torch.equal(found, expected)


def test_more_threads_find_the_same():
    threads = torch.get_num_threads()
    flat, rows, grad = draw(1, 1_000_003), draw(3000, 500), draw(1, 1_000_003, seed=3)
    try:
        torch.set_num_threads(3)
        one, two = flat.clone(), flat.clone()
        index, _ = fast.add_topk(one, grad, 1.0, 9_999, {})
        assert torch.equal(index, reference.add_topk(two, grad, 1.0, 9_999, {})[0])
        assert torch.equal(one, two)
        assert torch.equal(fast.topk(rows, 7), reference.topk(rows, 7))
        assert fast.above(flat[0], 2.0, 0)[1] == reference.above(flat[0], 2.0, 0)[1]
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_finite(bad):
    for n in (1, 31, 32, 1000):
        assert fast.finite(3e38 * torch.ones(n))
        for place in (0, n // 2, n - 1):
            x = torch.zeros(n)
            x[place] = bad
            assert not fast.finite(x)


@pytest.mark.parametrize("name", ["random", "tied", "zeros", "one of each end"])
def test_the_kth_of_many_is_that_of_a_sort(name):
    many = {
        "random": draw(1, 300_001)[0],
        "tied": draw(1, 300_001)[0].round(),
        "zeros": draw(1, 300_001)[0] * (draw(1, 300_001, seed=1)[0] > 0.5),
        "one of each end": torch.cat([torch.zeros(300_000), torch.tensor([float("inf")])]),
    }[name]
    keys = fast._to_bits(many.abs().numpy())
    assert keys.size > fast.MANY
    ordered = np.sort(keys)[::-1]
    for k in (1, 2, 1000, 150_000, 300_000, 300_001):
        assert fast._find_kth(keys, k) == ordered[k - 1]
