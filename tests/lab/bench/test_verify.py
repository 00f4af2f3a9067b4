"""Predicted beside measured: how it is scored, that it goes on where it stopped, one real cell."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from thinwire_lab.bench import verify
from thinwire_lab.bench.verify import AUTO, RECIPES, Cell, read, score
from thinwire_lab.local import netns


def cells(place, predicted, measured):
    model, workers, net = place
    calls = (*RECIPES, AUTO)
    return [
        Cell(model=model, workers=workers, net=net, recipe=call, predicted=p, measured=m)
        for call, p, m in zip(calls, predicted, measured, strict=True)
    ]


def test_the_score():
    right = cells(("mlp", 2, "1gbit"), [1.1, 2, 3, 4, 1.1], [1, 2, 3, 4, 1.05])
    near = cells(("mlp", 4, "1gbit"), [1, 0.9, 3, 4, 0.9], [1, 1.05, 3, 4, 1.2])
    wrong = cells(("mlp", 8, "1gbit"), [5, 1, 5, 5, 1], [1, 2, 3, 4, 1])
    found = score([*right, *near, *wrong])
    assert (found.right, found.places) == (2, 3)
    assert found.auto == pytest.approx(1.2)
    assert score(right).error == 0


def test_what_is_known_is_not_measured_again(tmp_path):
    path = tmp_path / "verify.jsonl"
    whole = cells(("mlp", 2, "1gbit"), [1] * 5, [1] * 5)
    part = cells(("mlp", 4, "1gbit"), [1] * 5, [1] * 5)[:3]
    lines = [json.dumps(asdict(cell)) for cell in [*whole, *part]]
    path.write_text("\n".join([*lines, '{"model": "ml']))  # broken off in the middle
    assert read(path) == whole
    seen = []
    assert verify.verify(path, places=[("mlp", 2, "1gbit")], on_cell=seen.append) == whole == seen
    assert read(tmp_path / "none.jsonl") == []


@pytest.mark.slow
@pytest.mark.skipif(netns.unavailable() is not None, reason=str(netns.unavailable()))
def test_a_cell_is_predicted_measured_and_kept(tmp_path):
    path = tmp_path / "verify.jsonl"
    found = verify.verify(path, places=[("small", 2, "1gbit")])
    assert [cell.recipe for cell in found] == [*RECIPES, AUTO]
    assert all(cell.predicted > 0 and cell.measured > 0 for cell in found)
    assert read(path) == found
