"""What was aimed at in trainings, held against the results that docs/results.md shows.

A target that was missed is named here with its figure: a better one makes the test fail, so that
the documents are mended too.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable
from math import inf
from pathlib import Path

import pytest

from thinwire import recipes
from thinwire.describe import describe
from thinwire_lab.runs import ledger
from thinwire_lab.runs.ledger import Line

BOOKS = Path(__file__).parents[3] / "docs" / "results"
README = (BOOKS.parents[1] / "README.md").read_text(encoding="utf-8")
LOW_RANK = ("powersgd", "acpsgd")
FEW_BITS = ("half", "bf16", "int8", "fp8", "natural", "qsgd", "terngrad", "signsgd", "onebit")
FAMILIES = {"dense", "int8", "onebit", "randomk", "topk", "dgc", "gtopk", "slots", "adtopk",
            "powersgd", "acpsgd"}  # fmt: skip


@pytest.fixture(scope="module")
def accuracy() -> dict[str, list[Line]]:
    found: dict[str, list[Line]] = {}
    for line in ledger.read([BOOKS / "accuracy.jsonl"]):
        found.setdefault(line.outcome.recipe, []).append(line)
    return found


def points(lines: list[Line]) -> float:
    return 100 * statistics.mean(line.outcome.figures["accuracy"] for line in lines)


def deviation(lines: list[Line]) -> float:
    return 100 * statistics.stdev(line.outcome.figures["accuracy"] for line in lines)


def less(lines: list[Line]) -> float:
    """How many times fewer bytes than dense were sent in the whole run."""
    metrics = [line.outcome.metrics for line in lines]
    return sum(m["bytes_dense"] for m in metrics) / sum(m["bytes_sent"] for m in metrics)


def below_dense(found: dict[str, list[Line]], wanted: Callable[[str], bool]) -> float:
    """How far the best of these, with three seeds each, is below dense."""
    return points(found["dense()"]) - max(
        points(lines) for call, lines in found.items() if wanted(call) and len(lines) >= 3
    )


def test_headlines_have_three_seeds_and_every_run_had_the_same_steps(accuracy):
    assert sum(len({line.seed for line in lines}) >= 3 for lines in accuracy.values()) >= 8
    assert {line.outcome.steps for lines in accuracy.values() for line in lines} == {936}
    assert all(len({line.seed for line in lines}) == len(lines) for lines in accuracy.values())


def test_sparse_recipes_send_as_little_as_was_asked_for(accuracy):
    limits = {"end=0.01,": 15, "end=0.05,": 6}
    above = {
        call
        for call, lines in accuracy.items()
        for end, most in limits.items()
        if end in call and less(lines) < most and "fp32" not in call
    }  # one run says what eight bits a value are worth
    assert not above and all(any(end in call for call in accuracy) for end in limits)


def test_the_best_are_as_near_to_dense_as_was_aimed_at(accuracy):
    assert below_dense(accuracy, lambda call: call.startswith(LOW_RANK)) <= 1
    assert below_dense(accuracy, lambda call: call.startswith(FEW_BITS)) <= 1
    assert below_dense(accuracy, lambda call: "end=0.01," in call) <= 3
    assert below_dense(accuracy, lambda call: "end=0.05," in call) <= 1.5


def test_interleaved_is_no_worse_than_plain(accuracy):
    mixed = next(c for c in accuracy if "interleave=True" in c and len(accuracy[c]) >= 3)
    plain = mixed.replace("interleave=True, ", "")
    assert points(accuracy[mixed]) >= points(accuracy[plain]) and len(accuracy[plain]) >= 3
    assert less(accuracy[mixed]) == pytest.approx(less(accuracy[plain]), rel=0.01)


def test_the_authors_rules_are_worth_what_they_claim(accuracy):
    """At the same ramp, memory and wire; and the documents say by how much, with the bytes."""
    ruled = next(c for c in accuracy if 'rows="dim1"' in c and len(accuracy[c]) >= 3)
    plain = 'topk(density=Ramp(start=0.3, end=0.01, steps=700), wire="int8+auto")'
    assert len(accuracy[plain]) >= 3 and points(accuracy[ruled]) > points(accuracy[plain]) + 2
    page = (BOOKS.parent / "results.md").read_text(encoding="utf-8")
    for call in (ruled, plain):
        lines = accuracy[call]
        assert f"| {points(lines):.1f} ± {deviation(lines):.1f} % | {less(lines):.1f} |" in page
    of_lstm = [line for line in ledger.read([BOOKS / "language.jsonl"]) if line.job == "lstm-lm"]
    for call in (ruled.split("(")[0], "topk"):
        lines = [x for x in of_lstm if x.outcome.recipe.startswith(f"{call}(density=Ramp(start=0.3")
                 and ("weight_hh" in x.outcome.recipe) == (call == "adtopk")]  # fmt: skip
        scores = [line.outcome.figures["perplexity"] for line in lines]
        assert len(scores) == 3
        assert f"{statistics.mean(scores):.1f} ± {statistics.stdev(scores):.1f}" in page


def test_every_recipe_had_its_run(accuracy):
    assert {call.split("(")[0] for call in accuracy} == set(recipes.__all__)


def test_what_tuned_costs_is_within_what_was_aimed_at(accuracy):
    """ResNet-20, three seeds: the savings asked for, and points below dense at the most."""
    kinds = {
        "int8()": (4, 1), "int4()": (8, 1), "tuned(saving=16, steps=936)": (16, 1),
        "tuned(saving=28, steps=936)": (28, 1.5),
    }  # fmt: skip
    for call, (saving, most) in kinds.items():
        assert len(accuracy[call]) == 3 and less(accuracy[call]) == pytest.approx(saving, rel=0.05)
        assert round(points(accuracy["dense()"]) - points(accuracy[call]), 2) <= most, call


@pytest.mark.parametrize(
    ("job", "call", "saving", "most"),
    [
        ("lstm-lm", "tuned(saving=16, steps=776, clipped=True)", 16, 0.01),
        ("gpt2", "int8()", 4, 0.005),
        ("gpt2", "int4()", 8, 0.01),
    ],
)
def test_what_tuned_costs_language_models(job, call, saving, most):
    """The codes are what tuned is for 4 and 8."""
    assert describe(recipes.tuned(saving=4)) == describe(recipes.int8())
    assert describe(recipes.tuned(saving=8)) == describe(recipes.int4())
    lines = [line for line in ledger.read([BOOKS / "language.jsonl"]) if line.job == job]
    (found,) = [line for line in lines if line.outcome.recipe == call]
    alike = [
        x for x in lines if (x.settings, x.outcome.steps) == (found.settings, found.outcome.steps)
    ]
    (dense,) = [line for line in alike if line.outcome.recipe == "dense()"]
    ratio = found.outcome.figures["perplexity"] / dense.outcome.figures["perplexity"]
    assert ratio <= 1 + most
    assert less([found]) == pytest.approx(saving, rel=0.05)


def first(line: Line, enough: float) -> dict[str, float]:
    """Its first score that is as good; none is later than any."""
    scores = [score for score in line.scores if score["accuracy"] >= enough]
    return min(scores, key=lambda score: score["step"], default={"step": inf, "elapsed": inf})


def test_vgg_is_there_three_times_sooner():
    lines = {(line.net, line.outcome.recipe): line for line in ledger.read([BOOKS / "vgg16.jsonl"])}
    enough = lines["100mbit", "ddp"].outcome.figures["accuracy"] - 0.01
    taken = {key: first(line, enough)["elapsed"] for key, line in lines.items()}
    others = [call for net, call in lines if net == "100mbit" and call not in ("ddp", "fp16-hook")]
    ours = min(others, key=lambda call: taken["100mbit", call])
    assert taken["100mbit", "ddp"] / taken["100mbit", ours] >= 3
    assert taken["100mbit", "fp16-hook"] > taken["100mbit", ours]
    assert {("1gbit", call) for call in ("ddp", "fp16-hook", ours)} <= set(lines)  # beside it


def test_vgg_is_there_with_every_seed():
    """DDP learns the same on any network, so for other seeds its pace is that of seed 0."""
    books = [ledger.read([path]) for path in sorted(BOOKS.glob("vgg16*.jsonl"))]
    assert sorted(sorted({line.seed for line in book}) for book in books) == [[0], [1], [2]]
    (pace,) = (line.outcome.step_seconds for book in books for line in book
               if (line.outcome.recipe, line.net) == ("ddp", "100mbit"))  # fmt: skip
    page = (BOOKS.parent / "results.md").read_text(encoding="utf-8")
    sooner: dict[str, list[float]] = {}
    for book in books:
        dense = next(line for line in book if line.outcome.recipe == "ddp")
        enough = dense.outcome.figures["accuracy"] - 0.01
        step = first(dense, enough)["step"]
        measured = dense.net == "100mbit"
        there = first(dense, enough)["elapsed"] if measured else pace * step
        for line in book:
            if line.net == "100mbit":
                times = there / first(line, enough)["elapsed"]
                sooner.setdefault(line.outcome.recipe, []).append(times)
        ours = next(line for line in book if line.outcome.recipe.startswith("gtopk"))
        ends = [f"{100 * one.outcome.figures['accuracy']:.4g} %" for one in (dense, ours)]
        found = first(ours, enough)
        row = [str(ours.seed), *ends, f"step {step}, {there:.0f} s",
               f"step {found['step']}, {found['elapsed']:.0f} s",
               f"{there / found['elapsed']:.1f}"]  # fmt: skip
        assert f"| {' | '.join(row)} |" in page
    always = [call for call, times in sooner.items() if len(times) == 3 and min(times) >= 3]
    assert [call.split("(")[0] for call in always] == ["gtopk"]


def test_where_it_does_not_help_has_the_figures_of_the_files(accuracy):
    page = (BOOKS.parent / "results.md").read_text(encoding="utf-8")
    told = " ".join(page.partition("## Where it does not help")[2].partition("##")[0].split())
    speed = (
        (BOOKS.parent / "performance.md").read_text(encoding="utf-8").partition("10 Gbit/s |")[2]
    )
    assert f"{float(re.search(r'`topk.*? [|] ([0-9.]+) [|] 5904', speed)[1]):.1f} times" in told
    slow = [line for line in ledger.read([BOOKS / "vgg16.jsonl"]) if line.net == "1gbit"]
    enough = next(x.outcome.figures["accuracy"] for x in slow if x.outcome.recipe == "ddp") - 0.01
    gtopk, ddp, half = (
        next(first(x, enough)["elapsed"] for x in slow if x.outcome.recipe.startswith(name))
        for name in ("gtopk", "ddp", "fp16-hook")
    )
    assert f"`gtopk` needs {gtopk:.0f} s, DDP {ddp:.0f} s and the 16-bit hook {half:.0f} s" in told
    below = points(accuracy["dense()"]) - points(accuracy["onebit()"])
    reads = {
        line.outcome.recipe: line.outcome.figures["perplexity"]
        for line in ledger.read([BOOKS / "language.jsonl"])
        if line.job == "lstm-lm"
    }
    above = 100 * (reads["onebit()"] / reads["dense()"] - 1)
    assert f"`onebit()` ends {below:.0f} points below" in told and f"{above:.0f} % above" in told
    assert "8.7 % in perplexity in 600 steps and 3.7 % in 1,200" in told  # asked below


@pytest.mark.parametrize("job", ["lstm-lm", "gpt2"])
def test_every_family_has_learnt_to_read_at_equal_steps(job):
    lines = [line for line in ledger.read([BOOKS / "language.jsonl"]) if line.job == job]
    beside: dict[str, set[str]] = {}
    for line in lines:
        settings = json.dumps(line.settings, sort_keys=True)
        beside.setdefault(settings, set()).add(line.outcome.recipe.split("(")[0])
    assert any(found >= FAMILIES for found in beside.values())


@pytest.mark.parametrize("job", ["lstm-lm", "gpt2"])
def test_perplexity_of_the_best_sparse_recipe(job):
    """At equal steps; as it ends, and at its best, since dense may over-train."""
    ratios = perplexities(job)
    assert min(max(pair) for pair in ratios.values()) <= 1.03


def test_gpt2_is_as_near_to_dense_only_where_dense_over_trains():
    """Missed in shorter trainings, by as much as the documents say."""
    best: dict[int, float] = {}
    for (steps, *_), (last, _) in perplexities("gpt2").items():
        best[steps] = min(last, best.get(steps, last))
    assert {steps: round(100 * ratio - 100, 1) for steps, ratio in best.items()} == {
        600: 8.7, 1200: 3.7, 1800: -0.6,
    }  # fmt: skip


def perplexities(job: str) -> dict[tuple[int, str, float], tuple[float, float]]:
    """Of recipes at 1 %, over those of dense at its best rate, else alike: the last, the best."""
    lines = [line for line in ledger.read([BOOKS / "language.jsonl"])
             if line.job == job and line.seed == 0]  # fmt: skip
    dense = [line for line in lines if line.outcome.recipe == "dense()"]
    found = {}
    for line in (line for line in lines if "end=0.01," in line.outcome.recipe):
        alike = line.settings | {"rate": 0.0}
        beside = [base for base in dense if base.settings | {"rate": 0.0} == alike]
        if not beside:  # another optimizer, with which dense has not run
            continue
        assert less([line]) >= 15 or "weight_hh" in line.outcome.recipe  # dense by its authors
        last, best = (
            pick(line) / min(pick(base) for base in beside)
            for pick in (
                lambda run: run.scores[-1]["perplexity"],
                lambda run: min(score["perplexity"] for score in run.scores),
            )
        )
        found[line.outcome.steps, line.outcome.recipe, line.settings["rate"]] = last, best
    return found
