"""Thresholds: the published closed forms against the table, corrections, capacity, odd inputs."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.selectors import threshold as module
from thinwire.selectors.drift import Drifting
from thinwire.selectors.estimators import Bisect, Constant, Sampled, gaussian, trimmed
from thinwire.selectors.sidco import FIRST, Sidco, exponential, gamma, pareto
from thinwire.selectors.threshold import Threshold, above, exact
from thinwire.selectors.topk import topk
from thinwire_lab.bench.selection import EXACT, SELECTORS

N = 1_000_000
# Achieved / target density on a million samples: sparsifiers.md, table of 10.7.
FORMS = [("exponential", 1), ("exponential", 2), ("exponential", 3), ("pareto", 1), ("pareto", 2),
         ("gamma", 1), ("gamma", 2)]  # fmt: skip
TABLE = {
    ("gaussian", 1e-2): (0.02, 0.64, 1.12, 1.63, 0.92, 0.55, 1.46),
    ("gaussian", 1e-3): (0.00, 0.10, 0.69, 6.93, 1.20, 0.03, 2.16),
    ("laplace", 1e-2): (1.00, 0.99, 1.00, 1.00, 1.00, 0.96, 0.99),
    ("laplace", 1e-3): (0.99, 0.97, 0.98, 0.99, 1.00, 0.93, 0.99),
    ("t3", 1e-2): (1.47, 1.16, 0.65, 0.78, 0.90, 1.61, 0.84),
    ("t3", 1e-3): (4.66, 3.52, 1.15, 1.28, 0.88, 5.17, 0.83),
}
ESTIMATORS = {
    "exact": exact,
    "sampled": Sampled(),
    "gaussian": gaussian,
    "bisect": Bisect(),
    "trimmed": trimmed,
    "constant": Constant(0.5),
    "sidco-e": Sidco(fit="exponential"),
    "sidco-gamma": Sidco(fit="gamma"),
    "sidco-gp": Sidco(fit="pareto"),
    "sidco-5": Sidco(fit="pareto", stages=5, adapt=False),
}
# As the recipes have them: every selector that estimates.
CORRECTED = {call: pick for call, pick in SELECTORS.items() if call != EXACT}


@pytest.fixture(scope="module")
def samples() -> dict[str, torch.Tensor]:
    """Drawn in this order from one generator, as the table's were."""
    draw = np.random.default_rng(0)
    drawn = {
        "gaussian": draw.standard_normal(N),
        "laplace": draw.laplace(size=N),
        "t3": draw.standard_t(3, size=N),
    }
    return {name: torch.from_numpy(x).float() for name, x in drawn.items()}


@pytest.mark.parametrize("density", [1e-2, 1e-3])
@pytest.mark.parametrize("data", ["gaussian", "laplace", "t3"])
def test_sidcos_closed_forms_reproduce_the_table(samples, data, density):
    size = samples[data].abs()
    tolerance = 0.25 if (data, density) == ("t3", 1e-3) else 0.05
    for (fit, stages), published in zip(FORMS, TABLE[data, density], strict=True):
        theta = Sidco(fit=fit, stages=stages, adapt=False).threshold(size, density, stages)
        achieved = int((size >= theta).sum()) / (density * N)
        # the table has two digits: half a unit of the last one is its own rounding
        assert abs(achieved - published) <= tolerance * published + 0.005, (fit, stages)


def test_sidcos_fits_are_the_papers_formulas():
    size = torch.rand(10_000, generator=torch.Generator().manual_seed(0)).square()
    mean, variance = float(size.mean()), float(size.var(correction=0))
    share = 0.03
    assert exponential(size, share) == pytest.approx(-mean * math.log(share), rel=1e-6)
    kappa = 0.5 * (mean**2 / variance - 1)
    sigma = 0.5 * mean * (mean**2 / variance + 1)
    assert pareto(size, share) == pytest.approx(sigma * (1 - share**kappa) / kappa, rel=1e-5)
    s = math.log(mean) - float(size.log().mean())
    alpha = (3 - s + math.sqrt((s - 3) ** 2 + 24 * s)) / (12 * s)
    expected = -mean / alpha * (math.log(share) + math.lgamma(alpha))
    assert gamma(size, share) == pytest.approx(expected, rel=1e-5)


def test_pareto_has_no_hole_at_the_exponential():
    """kappa = 0, where the formula is 0 / 0: just beside it the values agree."""
    size = -torch.log(torch.rand(1_000_000, generator=torch.Generator().manual_seed(1)))
    assert pareto(size, 0.01) == pytest.approx(exponential(size, 0.01), rel=0.02)


def test_stages_share_the_density():
    """A quarter first, then equal ratios that multiply to the density."""
    x = -torch.log(torch.rand(1_000_000, generator=torch.Generator().manual_seed(2)))
    for stages in (1, 2, 3, 4):
        theta = Sidco(fit="exponential", stages=stages, adapt=False).threshold(x, 0.01, stages)
        assert theta == pytest.approx(-math.log(0.01), rel=0.03)
    wide = Sidco(fit="exponential", stages=4, adapt=False)
    assert wide.threshold(x, FIRST, 4) == pytest.approx(exponential(x, FIRST), rel=1e-6)


def test_the_number_of_stages_follows_what_is_achieved():
    """Exponential fits of a Gaussian select far too few with one stage: more are taken."""
    state: dict = {}
    pick = Threshold(estimate=Sidco(fit="exponential", stages=1), correct=None)
    draw = torch.Generator().manual_seed(3)
    for _ in range(40):
        pick(torch.randn(1, 100_000, generator=draw), 1000, state)
    assert state["stages"] >= 2
    assert 0.5 <= state["found"] <= 2


def test_a_falling_density_does_not_upset_the_stages():
    """What was found counts against the k it was found for."""
    pick, state = Threshold(estimate=Sidco(), correct=None, capacity=100.0), {}
    draw = torch.Generator().manual_seed(4)
    for k in [5000] * 13 + [50] * 12:
        pick(torch.randn(1, 100_000, generator=draw), k, state)
        assert state["stages"] <= 3 and 0.3 < state["found"] < 3


@pytest.mark.parametrize("density", [1e-2, 1e-3])
def test_gaussianks_quantile(samples, density):
    """z = Phi^-1(1 - density / 2): right on a Gaussian, by its formula on the others."""
    z = NormalDist().inv_cdf(1 - density / 2)
    k = int(density * N)
    for data, x in samples.items():
        theta = gaussian(x.abs(), k, {})
        assert theta == pytest.approx(z * float(x.double().square().mean().sqrt()), rel=1e-4)
        if data == "gaussian":  # table: 1.00 and 0.99, no rounds needed
            assert int((x.abs() >= theta).sum()) / k == pytest.approx(1.0, rel=0.05)


@pytest.mark.parametrize("density", [1e-2, 1e-3])
@pytest.mark.parametrize("data", ["gaussian", "laplace", "t3"])
@pytest.mark.parametrize("name", CORRECTED)
def test_corrected_counts_stay_near_k_while_a_residual_grows(samples, name, data, density):
    """Fifty steps of error feedback: never below k / 2, never above 2 k."""
    x, k = samples[data][:200_000], int(density * 200_000)
    residual, state = torch.zeros_like(x), {}
    shift = torch.Generator().manual_seed(0)
    for _ in range(50):
        residual += x.roll(int(torch.randint(x.numel(), (1,), generator=shift)))
        chosen = CORRECTED[name](residual[None], k, state)
        assert k / 2 <= chosen.numel() <= 2 * k
        residual[chosen] = 0.0


@pytest.mark.slow
@pytest.mark.parametrize("name", CORRECTED)
def test_the_same_with_a_million(samples, name):
    k = 1_000
    for x in samples.values():
        residual, state = torch.zeros_like(x), {}
        for step in range(50):
            residual += x.roll(7919 * step)
            chosen = CORRECTED[name](residual[None], k, state)
            assert k / 2 <= chosen.numel() <= 2 * k
            residual[chosen] = 0.0


def test_overflow_drops_the_smallest_never_the_last():
    rows = torch.arange(1.0, 101.0)[None]  # ascending: the largest are the last
    pick = Threshold(estimate=Constant(10.0), correct=None, capacity=2.0)
    assert pick(rows, 5, {}).tolist() == list(range(90, 100))
    assert pick(-rows.flip(1), 5, {}).tolist() == list(range(10))
    assert above(rows[0], 98.0, 10).tolist() == [97, 98, 99]


def test_magnitudes_count_not_signs():
    rows = torch.tensor([[-5.0, 1.0, -4.0, 2.0, 3.0]])
    for estimate in (exact, Bisect(), Sampled(fraction=1.0)):
        assert {0, 2} <= set(Threshold(estimate=estimate)(rows, 2, {}).tolist())


ODD = {
    "zero": torch.zeros(1, 4096),
    "constant": torch.full((1, 4096), -3.0),
    "one-hot": torch.nn.functional.one_hot(torch.tensor([77]), 4096).float(),
    "heavy": torch.randn(1, 4096, generator=torch.Generator().manual_seed(0)).pow(9),
    "tiny": torch.full((1, 4096), 1e-42),
    "huge": torch.linspace(-1, 1, 4096)[None] * 3e38,
    "two values": torch.cat([torch.ones(1, 4000), torch.full((1, 96), 1e6)], dim=1),
    "spread": torch.logspace(-38, 38, 4096)[None],
    "single": torch.tensor([[2.0]]),
    "nan": torch.tensor([[1.0, math.nan, 3.0, 0.5]]),
    "inf": torch.tensor([[1.0, 2.0, -math.inf, 0.5]]),
}


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("name", ESTIMATORS)
def test_odd_inputs_have_an_answer_in_bounded_passes(name, kind, monkeypatch):
    """A few nonzero entries at least, no more than the capacity, NaN among them; few counts."""
    passes = 0
    counted = module._count

    def count(size, theta):
        nonlocal passes
        passes += 1
        return counted(size, theta)

    monkeypatch.setattr(module, "_count", count)
    rows, state = ODD[kind], {}
    k = max(1, rows.numel() // 100)
    pick = Threshold(estimate=ESTIMATORS[name])
    for _ in range(3):
        passes = 0
        chosen = pick(rows, k, state)
        assert passes <= module.PROBES + 2
        assert chosen.numel() == chosen.unique().numel() <= 2 * k
        nonzero = int((rows != 0).sum())
        assert int((rows[0, chosen] != 0).sum()) >= min(nonzero, math.ceil(k / 2))
        broken = (~rows[0].isfinite()).nonzero().reshape(-1)
        assert set(broken.tolist()) <= set(chosen.tolist())
        assert all(math.isfinite(v) for v in state.values() if isinstance(v, float))


@pytest.mark.parametrize("kind", ODD)
def test_odd_inputs_for_the_exact_and_the_drifting(kind):
    rows = ODD[kind]
    k = max(1, rows.numel() // 100)
    for pick, turns in ((topk, 1), (Drifting(warmup=2), 9)):
        state: dict = {}
        for _ in range(turns):
            chosen = pick(rows, k, state)
            assert chosen.numel() == chosen.unique().numel() <= 2 * k
            broken = (~rows[0].isfinite()).nonzero().reshape(-1)
            assert set(broken.tolist()) <= set(chosen.tolist())
            if hasattr(pick, "settle"):
                pick.settle([state], lambda votes: votes)


@settings(max_examples=60)
@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=300), st.data())
def test_any_numbers_are_cut_at_one_magnitude(numbers, data):
    """Nothing that is kept is smaller than anything that is left."""
    rows = torch.tensor([numbers])
    k = data.draw(st.integers(1, len(numbers)))
    name = data.draw(st.sampled_from(sorted(CORRECTED)))
    chosen = CORRECTED[name](rows, k, {})
    left = torch.ones(len(numbers), dtype=torch.bool)
    left[chosen] = False
    if chosen.numel() and left.any():
        assert rows[0, chosen].abs().min() >= rows[0, left].abs().max()


def test_a_threshold_is_reused_and_nudged():
    draw = torch.Generator().manual_seed(0)
    calls = []

    def estimate(size, k, state):
        calls.append(k)
        return exact(size, k, state)

    pick = Threshold(estimate=estimate, refresh=4, nudge=1.05, correct=(0.2, 5.0))
    state: dict = {}
    thresholds = []
    for step in range(9):
        rows = torch.randn(1, 10_000, generator=draw) * (1 + 0.15 * step)  # ever larger
        pick(rows, 100, state)
        thresholds.append(state["threshold"])
    assert len(calls) == 3, "at steps 0, 4 and 8"
    assert thresholds[2] == pytest.approx(thresholds[1] * 1.05), "too many came through"
    pick(torch.randn(1, 10_000, generator=draw), 50, state)
    assert calls[-1] == 50, "another k needs another threshold"


@pytest.mark.parametrize(
    ("share", "factor"), [(0.5, 1 / 1.05), (0.66, 1 / 1.05), (0.67, 1), (1.25, 1), (1.26, 1.05)]
)
def test_a_threshold_that_is_reused_follows_what_it_lets_through(share, factor):
    """Ok-Topk's band: down below two thirds of k, up above five quarters."""
    pick, k = Threshold(refresh=9, nudge=1.05, correct=None, capacity=9.0), 100
    state = {"age": 1, "k": k, "threshold": 1.0}
    rows = torch.full((1, 1000), 0.5)
    rows[0, : round(share * k)] = 2.0
    assert pick(rows, k, state).numel() == round(share * k)
    assert state["threshold"] == pytest.approx(factor)


def test_trimming_ends_where_just_k_are_left():
    """Mean 1, largest 11: five entries at 9, where r is 0.8, and the rest far below."""
    rest = (1.0 * 100 - 11 - 5 * 9) / 94
    size = torch.tensor([11.0] + [9.0 + 1e-4] * 5 + [rest] * 94)
    assert trimmed(size, 6, {}) == pytest.approx(9.0, abs=1e-3)
    assert trimmed(size, 7, {}) == 0.0, "not even above the mean"


def test_every_sample_starts_elsewhere():
    """Nine draws of every ninth entry see all of the row, in whatever pattern it is."""
    size, state = torch.arange(1100) % 9 + 1.0, {}
    found = [Sampled(fraction=0.1)(size, 100, state) for _ in range(18)]
    assert set(found[:9]) == set(range(1, 10)) and found[9:] == found[:9]


def test_one_row_at_a_time():
    with pytest.raises(ValueError, match=r"one row, got 3 of them; use over=by_layer"):
        Threshold()(torch.ones(3, 4), 1, {})


@pytest.mark.parametrize(("make", "message"), [
    (lambda: Threshold(capacity=0.5), "capacity must be at least 1.0"),
    (lambda: Threshold(refresh=0), "refresh must be a whole number of at least 1, got 0"),
    (lambda: Threshold(nudge=0.9), "nudge must be at least 1.0"),
    (lambda: Threshold(correct=(1.2, 2.0)), "correct must be .low, high. around 1"),
    (lambda: Constant(-1.0), "a threshold must be a number, 0 or more"),
    (lambda: Sampled(fraction=0.0), "sample must be a fraction"),
    (lambda: Bisect(epsilon=2.0), "epsilon must be in"),
    (lambda: Sidco(fit="cauchy"), "fit must be one of exponential, gamma, pareto, got 'cauchy'"),
    (lambda: Sidco(stages=0), "stages must be a whole number of at least 1"),
])  # fmt: skip
def test_bad_settings(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_reused_threshold_is_nudged_both_ways():
    """Fewer than two thirds of k: down; more than five quarters: up; in between it stays."""
    rows = torch.randn(1, 10_000, generator=torch.Generator().manual_seed(0))
    for scale, factor in ((0.7, 1 / 1.012), (1.0, 1.0), (1.3, 1.012)):
        state: dict = {}
        pick = Threshold(estimate=exact, refresh=32, nudge=1.012, correct=None)
        pick(rows, 100, state)
        first = state["threshold"]
        pick(rows * scale, 100, state)
        assert state["threshold"] == pytest.approx(first * factor)
