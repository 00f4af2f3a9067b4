"""What recipes cost in accuracy: the file, the command that makes it, and how it is asked."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from thinwire import evidence, recipes
from thinwire.evidence import find, trials, worst
from thinwire.recipes.auto import recorded
from thinwire_lab.runs import evidence as made
from thinwire_lab.runs import ledger

PAGE = (made.RESULTS.parent / "planning.md").read_text(encoding="utf-8")
LINES = ledger.read(sorted(made.RESULTS.glob("*.jsonl")))
GTOPK = (
    "gtopk(density=Flushed(Ramp(start=0.3, end=0.01, steps={ramp}), {steps}), "
    'memory=MomentumCorrected(learning_rate=True), wire="int8+auto")'
)


def test_the_file_is_what_the_command_writes(tmp_path):
    made.write(tmp_path / "new.json")
    assert (tmp_path / "new.json").read_text() == evidence.FILE.read_text(), (
        "evidence.json is old; run python -m thinwire_lab.runs.evidence"
    )


def test_only_trainings_that_say_something_of_accuracy_are_in_it():
    assert {trial.job for trial in trials()} == {"resnet20", "vgg16", "lstm-lm", "gpt2"}
    assert {trial.optimizer for trial in trials()} == {"sgd", "adamw"}
    assert {trial.job for trial in trials() if trial.clipped} == {"lstm-lm", "gpt2"}
    assert all(trial.seeds >= 1 and trial.saving > 0 for trial in trials())
    for trial in trials():
        recipes.parse(trial.recipe)  # a call that one can type


def test_costs_are_points_of_accuracy_and_percent_of_perplexity():
    """By hand from docs/results.md: dense 67.38 %, gtopk 67.4 %; perplexity 94.07 and 185.18."""
    (gtopk,) = find(GTOPK.format(ramp=700, steps=936))
    assert (gtopk.seeds, gtopk.steps, gtopk.workers) == (3, 936, 4)
    assert gtopk.cost == pytest.approx(67.38 - 67.40, abs=0.02)
    assert gtopk.saving == pytest.approx(28.4, abs=0.1)
    (gpt2,) = find("acpsgd(rank=4)", "adam")
    assert gpt2.cost == pytest.approx(100 * (185.18 / 94.07 - 1), abs=0.1)
    assert worst(find("acpsgd(rank=4)")) == gpt2 and worst(find("acpsgd(rank=4)", "sgd")) != gpt2


def test_the_same_recipe_is_found_whatever_the_length_of_its_schedules():
    recorded = find(GTOPK.format(ramp=700, steps=936))
    assert find(GTOPK.format(ramp=9, steps=10_000)) == recorded != ()
    turned = (
        'gtopk(wire="int8+auto", memory=MomentumCorrected(learning_rate=True), '
        "density=Flushed(Ramp(end=0.01, start=0.3, steps=7), steps=8))"
    )
    assert find(turned) == recorded
    piecewise = (
        "powersgd(rank=Piecewise(({},), (8, 64)), memory=MomentumCorrected("
        'learning_rate=True), wire="bf16")'
    )
    assert find(piecewise.format(9)) == find(piecewise.format(935)) != ()
    assert find("int8") == find("int8()") != ()


def test_another_recipe_is_not():
    other = GTOPK.format(ramp=700, steps=936)
    for old, new in (("0.3", "0.4"), ("int8", "fp32+x"), ("gtopk", "dgc2"), ("True", "False")):
        assert find(other.replace(old, new)) == ()
    assert find("topk(density=0.01)") == find("not a call(") == find("nosuch()") == ()
    assert find("int8()", "lamb") == ()


def test_a_seed_on_two_networks_counts_once_and_the_rest_is_their_mean():
    some = [line for line in LINES if line.job == "vgg16" and line.size == "small"]
    (trial,) = [t for t in made.collect(some) if "gtopk" in t.recipe]
    assert trial.seeds == 3
    assert [t for t in made.collect([*some, *some]) if "gtopk" in t.recipe] == [trial]


def test_what_has_no_dense_training_beside_it_or_is_tiny_is_left_out():
    some = [line for line in LINES if line.job == "resnet20"]
    calls = {line.outcome.recipe for line in some}
    assert {trial.recipe for trial in made.collect(some)} == calls - {"auto()"}  # what ran?
    assert made.collect([line for line in some if line.outcome.recipe != "dense()"]) == []
    assert made.collect([replace(line, size="tiny") for line in some]) == []
    apart = [
        line if line.outcome.recipe == "dense()" else
        replace(line, settings=line.settings | {"rate": 0.05})
        for line in some
    ]  # fmt: skip
    assert {trial.recipe for trial in made.collect(apart)} == {"dense()"}


def test_a_training_that_diverged_costs_more_than_any_tolerance():
    some = [line for line in LINES if line.job == "resnet20"]
    for line in some:
        if line.outcome.recipe == "int8()":
            figures = line.outcome.figures | {"accuracy": float("nan")}
            lost = replace(line, outcome=replace(line.outcome, figures=figures))
            some = [lost if one is line else one for one in some]
    (trial,) = [trial for trial in made.collect(some) if trial.recipe == "int8()"]
    assert trial.cost == float("inf")


def test_the_page_has_the_figures_of_the_file(capsys):
    assert f"{len(trials())} entries" in PAGE
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(code, {})
    assert len(capsys.readouterr().out.splitlines()) == len(find("int8()"))
    named = ["dense", *(name for name in recorded(1.0, density=0.01, rank=4) if name != "dense")]
    assert "`, `".join(named[:-1]) + f"` and `{named[-1]}`" in " ".join(PAGE.split())
    plan = recipes.auto().inner
    assert f"take {len(plan._turns(()))} steps" in PAGE
