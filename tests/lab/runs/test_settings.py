"""Settings and schedules: checked when they are made, and what the papers say they are."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from thinwire import recipes
from thinwire.combinators import memories
from thinwire.memory import MomentumCorrected
from thinwire_lab.jobs.job import Settings, make_settings
from thinwire_lab.runs import config
from thinwire_lab.runs.loop import count_steps
from thinwire_lab.runs.optimizers import Plateau, optimizer_of, rate_factor, with_momentum

BASE = Settings(batch=4, rate=0.1)
DOCUMENT = Path(__file__).parents[3] / "docs" / "training.md"


@pytest.mark.parametrize(
    ("values", "message"),
    [({"batch": 0}, "batch must be at least 1, got 0"), ({"rate": 0.0}, "rate must be above 0"),
     ({"optimizer": "lion"}, "optimizer must be one of sgd, adam, adamw, sign, got 'lion'"),
     ({"precision": "int4"}, "precision must be one of fp32"), ({"batch": "4"}, "batch is a int"),
     ({"epochs": 0}, "give steps, or epochs above 0"), ({"speed": 1}, "unknown setting 'speed'"),
     ({"seed": 10**18}, "seed must be at most 4294967296, got 1000000000000000000"),
     ({"warmup": -1}, "warmup must be at least 0"), ({"momentum": True}, "momentum is a float"),
     ({"length": 4}, "length must be at least 16, got 4"),
     ({"schedule": "plateau", "score_every": 0}, "give score_every above 0")],
)  # fmt: skip
def test_bad_settings_are_one_message(values, message):
    with pytest.raises(ValueError, match=message):
        make_settings(values, BASE)


def test_every_setting_is_documented():
    section = DOCUMENT.read_text(encoding="utf-8").split("\n## Settings\n")[1].split("\n## ")[0]
    assert [f.name for f in fields(Settings) if f"`{f.name}`" not in section] == []


def test_whole_numbers_do_for_others():
    made = make_settings({"rate": 1, "milestones": [3, 4.5]}, BASE)
    assert made.rate == 1.0 and made.milestones == (3.0, 4.5)


def test_a_run_survives_its_toml(tmp_path):
    run = config.make_run({"job": "vgg16", "size": "paper", "recipe": "topk(density=0.01)",
                       "data": "fake", "workers": 8, "net": "1gbit",
                       "settings": {"rate": 0.3}})  # fmt: skip
    path = tmp_path / "config.toml"
    path.write_text(config.to_toml(run))
    assert config.make_run(config.read_toml(path)) == run


@pytest.mark.parametrize(
    ("values", "message"),
    [({"job": "vgg"}, "unknown job 'vgg'"), ({"job": "mlp", "size": "huge"}, "--size is one of"),
     ({"job": "mlp", "recipe": "topk(density=7)"}, "density must be in"),
     ({"job": "mlp", "recipe": "dgc(sample='a')"}, "in the recipe \"dgc"),
     ({"job": "mlp", "recipe": "dgc(density=Ramp(start='a', end=1, steps=2))"}, "in the recipe"),
     ({"job": "mlp", "colour": "red"}, "unknown colour"),
     ({"job": "mlp", "workers": 0}, "workers must be 1 to 250, got 0"),
     ({"job": "mlp", "workers": "two"}, "workers must be a whole number, got 'two'"),
     ({"job": "mlp", "data": 5}, "data must be a string, got 5"),
     ({"job": "mlp", "settings": 3}, "settings must be a table, got 3"),
     ({"job": "mlp", "settings": {"length": 32}}, "length is for jobs that read text")],
)  # fmt: skip
def test_bad_runs_are_one_message(values, message):
    with pytest.raises(ValueError, match=message):
        config.make_run(values)


def test_bad_files_are_one_message(tmp_path):
    with pytest.raises(ValueError, match=r"cannot read .*: No such file"):
        config.read_toml(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("a = = b")
    with pytest.raises(ValueError, match="is no TOML"):
        config.read_toml(tmp_path / "bad.toml")


def test_epochs_that_are_asked_for_count_where_a_job_counts_in_steps(tmp_path):
    assert config.make_run({"job": "mlp"}).settings.total(19) == 60
    run = config.make_run({"job": "mlp", "settings": {"epochs": 2}})
    assert run.settings.total(19) == 38
    (tmp_path / "config.toml").write_text(config.to_toml(run))
    assert config.make_run(config.read_toml(tmp_path / "config.toml")) == run


def test_epochs_are_whole_where_several_batches_make_a_step():
    task = SimpleNamespace(train=range(1000))
    for accumulate, steps in ((1, 750), (20, 38), (3, 250), (7, 108)):
        settings = Settings(batch=4, rate=1.0, epochs=3, accumulate=accumulate)
        each, total = count_steps(task, settings, 1)
        assert each * accumulate == pytest.approx(250) and total == steps


def test_learning_rates():
    cosine = Settings(batch=1, rate=1.0, epochs=10, warmup=2)
    values = [rate_factor(cosine, step, 100, 10) for step in range(100)]
    assert values[0] == pytest.approx(1 / 20) and values[19] == values[20] == 1.0
    assert values[60] == pytest.approx(0.5) and values[-1] < 0.001
    assert all(a >= b for a, b in pairwise(values[20:]))
    stairs = Settings(batch=1, rate=1.0, schedule="milestones", milestones=(3, 6))
    assert [rate_factor(stairs, s, 100, 10) for s in (29, 30, 60)] == pytest.approx(
        [1.0, 0.1, 0.01]
    )
    line = Settings(batch=1, rate=1.0, schedule="linear")
    assert rate_factor(line, 75, 100, 10) == 0.25
    counted = Settings(batch=1, rate=1.0, warmup=5, warmup_steps=4, schedule="constant")
    assert [rate_factor(counted, s, 100, 10) for s in (0, 3, 4)] == [0.25, 1.0, 1.0]
    flat = Settings(batch=1, rate=1.0, schedule="constant")
    assert rate_factor(flat, 99, 100, 10) == 1.0
    part = replace(cosine, schedule_steps=100)  # the first steps of a longer training
    assert [rate_factor(part, s, 30, 10) for s in range(30)] == values[:30]
    assert rate_factor(part, 200, 300, 10) == 0.0


@pytest.mark.parametrize(
    "losses",
    [[5, 4, 4, 4, 4, 3, 3, 3.1, 3, 3, 3, 3, 3], [1.0, 0.99995, 0.99992, 0.99991, 0.9999, 0.9],
     [math.nan, 9, 8, 8, 8, 8, 7], [math.inf] * 4, [3, math.nan, math.nan, math.nan, 2]],
)  # fmt: skip
def test_a_plateau_ends_as_torch_has_it(losses):
    settings = Settings(batch=1, rate=1.0, schedule="plateau", gamma=0.5, patience=2)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    theirs = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=2)
    ours = Plateau()
    for step, loss in enumerate(losses, 1):
        theirs.step(loss)
        ours.add_score(settings, step, loss)
        ours.add_score(settings, step, -1e9)  # once more, after a resume
        assert ours.factor == optimizer.param_groups[0]["lr"]
    assert ours.factor < 1


def test_shares_have_plateaus_too():
    settings = Settings(batch=1, rate=1.0, schedule="plateau", gamma=0.5, patience=2)
    found = Plateau()
    for step, accuracy in enumerate((0.1, 0.5, 0.4, 0.5, 0.5, 0.6), 1):
        found.add_score(settings, step, -accuracy)
    assert (found.factor, found.waited, found.best) == (0.5, 0, -0.6)


def test_rates_of_all_workers_together():
    for by_workers, expected in ((False, 0.1), (True, 0.4)):
        settings = Settings(batch=1, rate=0.1, rate_by_workers=by_workers)
        groups = optimizer_of(torch.nn.Linear(2, 2), settings, 4, None).param_groups
        assert [group["base"] for group in groups] == pytest.approx([expected] * 2)


def test_a_recipe_that_applies_momentum_clips_and_decays_as_the_optimizer_would():
    net = torch.nn.Linear(2, 2)
    settings = Settings(batch=1, rate=1.0, momentum=0.8, clip=0.5, weight_decay=0.01)
    own = with_momentum(recipes.dgc(), settings, 4)
    (memory,) = memories(own)
    assert (memory.momentum, memory.clip) == (0.8, 2.0)  # of which a worker takes a half
    group = optimizer_of(net, settings, 4, own).param_groups[0]
    assert group["momentum"] == 0.0 and group["weight_decay"] == pytest.approx(0.05)
    given = recipes.topk(memory=MomentumCorrected(clip=3.0))
    assert memories(with_momentum(given, settings, 4))[0].clip == 3.0
    heavy = recipes.topk(memory=MomentumCorrected(momentum=0.5))
    assert memories(with_momentum(heavy, settings, 4))[0].momentum == 0.5
    whole = recipes.tuned(saving=16, steps=9)  # it moves momentum itself, where nothing clips
    assert repr(with_momentum(whole, settings, 4)) == "tuned(saving=16.0, steps=9, clipped=True)"
    plain = recipes.topk()
    assert with_momentum(plain, settings, 4) == plain
    assert optimizer_of(net, settings, 4, plain).param_groups[0]["momentum"] == 0.8


def test_signs_move_every_entry_by_the_rate_and_matrices_decay():
    net = torch.nn.Linear(2, 2)
    weight, bias = (p.detach().clone() for p in net.parameters())
    settings = Settings(batch=1, rate=0.1, optimizer="sign", weight_decay=0.5)
    optimizer = optimizer_of(net, settings, 4, recipes.demo_dct())
    optimizer.step()  # no gradients, as of what took no part: nothing moves
    assert torch.equal(net.weight, weight)
    net.weight.grad = torch.tensor([[3.0, -0.01], [0.0, 7.0]])
    net.bias.grad = torch.tensor([-2.0, 0.0])
    optimizer.step()
    moved = torch.tensor([[-0.1, 0.1], [0.0, -0.1]])
    assert torch.allclose(net.weight, weight * (1 - 0.1 * 0.5) + moved)
    assert torch.allclose(net.bias, bias + torch.tensor([0.1, 0.0]))
