"""Closed forms: each against its formula, and what `list` prints for a model."""

from __future__ import annotations

import math

import pytest

from thinwire import recipes
from thinwire.plan import prices, units
from thinwire_lab.simulate.costs import COSTS, Problem

BY_NAME = {cost.name: cost for cost in COSTS}


def test_the_example_of_the_table():
    """BERT at 1 %, 32 ranks, 10 Gbit/s, 30 us: collectives.md, section 5."""
    problem = Problem(d=133_500_000, k=1_300_000, world=32)
    alpha, beta = 30e-6, 3.2e-9

    def ms(name):
        return 1000 * BY_NAME[name].seconds(problem, alpha, beta)

    assert ms("Ok-Topk (worst)") == pytest.approx(25 + 2.2, rel=0.05)
    assert ms("gTop-k (tree)") == pytest.approx(85, rel=0.05)
    assert ms("Top-k (all-gather)") == pytest.approx(265, rel=0.05)
    assert ms("dense (ring)") == pytest.approx(828, rel=0.05)


@pytest.mark.parametrize("world", [1, 2, 3, 8, 100])
def test_formulas(world):
    d, k, r, n = 10_000_000, 10_000, 4, 1024
    p = Problem(d=d, k=k, world=world, rank=r, side=n)
    share, log = (world - 1) / world, math.ceil(math.log2(world))
    words = {
        "dense (ring)": 2 * d * share,
        "dense (halving)": 2 * d * share,
        "16-bit (halving)": d * share,
        "Top-k (all-gather)": 2 * k * (world - 1),
        "gTop-k (tree)": 4 * k * log,
        "gTop-k (butterfly)": 2 * k * log,
        "TopkDSA (worst)": (2 * k + d) * share,
        "TopkDSA (best)": 4 * k * share,
        "Ok-Topk (worst)": 6 * k * share,
        "SparDL": 4 * k * share,
        "PowerSGD": 2 * 2 * (d / n**2) * n * r * share,
        "ACP-SGD": 2 * (d / n**2) * n * r * share,
    }
    assert {c.name: c.words(p) for c in COSTS} == pytest.approx(words)
    assert all(c.messages(p) == 0 for c in COSTS) == (world == 1)


def test_the_catalogue_prices_every_recipe_as_it_prices_itself():
    params = 3 * (1024 * 1024 + 1024)
    entries = prices.catalogue(params, world=4, density=0.01, rank=4)
    assert [entry.name for entry in entries] == recipes.names()
    by_name = {entry.name: entry for entry in entries}
    assert by_name["dense"].bytes == by_name["dense"].bytes_dense == 2 * 3 * params
    layer = prices.model(1024, 1024, 1024)
    assert by_name["topk"].bytes == 3 * recipes.topk().traffic(layer, 4).bytes
    assert by_name["randomk"].bytes_dense / by_name["randomk"].bytes == pytest.approx(100, rel=0.01)
    for entry in entries:
        assert entry.source and entry.summary.endswith("."), entry.name
        assert entry.composition.startswith(("Remember", "Project")), entry.name


def test_small_models_have_a_price_too():
    for params in (1, 7, 1023, 1025, 2_000_000):
        entries = {entry.name: entry for entry in prices.catalogue(params, 2, 1.0, 4)}
        assert all(entry.bytes >= 0 for entry in entries.values())
        assert entries["dense"].bytes == entries["dense"].bytes_dense == 4 * params


@pytest.mark.parametrize(
    ("text", "value"),
    [("1gbit", 1e9), ("2.5Mbit", 2.5e6), ("800kbit", 8e5), ("100mbps", 1e8), ("1 Gbit/s", 1e9)],
)
def test_rates(text, value):
    assert units.rate(text) == value


def test_times():
    assert units.seconds("50us") == pytest.approx(5e-5)


@pytest.mark.parametrize(
    "text", ["", "1", "gbit", "0gbit", "1 furlong", "-1gbit", "9MB/s", "9gbit/"]
)
def test_bad_rates(text):
    with pytest.raises(ValueError, match=r"a rate is a number and a unit .* e\.g\. 1gbit"):
        units.rate(text)


def test_bad_problems():
    with pytest.raises(ValueError, match="k must be at most d"):
        Problem(d=10, k=20, world=2)
    with pytest.raises(ValueError, match="world must be at least 1"):
        Problem(d=10, k=1, world=0)
