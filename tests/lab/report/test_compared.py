"""What a comparison draws is what was logged, on the axes it names."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest

from thinwire_lab.report import comparison, page, style
from thinwire_lab.report.scores import SMOOTH, by_recipe, draw_references, front

pytest.importorskip("matplotlib")
LONG = "topk(density={'[a-z]$': 1.0, r'b\\.c$': 0.5, '': Ramp(start=0.3, end=0.01, steps=700)})"


@pytest.mark.parametrize(
    ("across", "label", "scale"),
    [("step", "steps", 1), ("bytes_sent", "MB sent by a worker", 1e6),
     ("elapsed", "seconds of training", 1)],
)  # fmt: skip
def test_curves_are_drawn_against_what_they_say(across, label, scale, entry):
    runs = [entry("dense()", 0.1), entry("topk()", 0.2)]
    for name in ("loss", "accuracy"):
        figure = comparison._curves(runs, across, name)
        (axes,) = figure.axes
        assert axes.get_xlabel() == label and axes.get_ylabel() == name
        for line, run in zip(axes.lines, runs, strict=True):
            records = run.losses if name == "loss" else run.scores
            assert list(line.get_xdata()) == [r[across] / scale for r in records]
            last = [r[name] for r in records][-SMOOTH if name == "loss" else -1 :]
            assert line.get_ydata()[-1] == pytest.approx(statistics.mean(last))


def test_bars_are_as_long_as_what_they_stand_for(entry):
    runs = [entry("dense()", 0.1), entry(LONG, 0.2)]
    phases = comparison._phases(runs)
    widths = [bar.get_width() for bar in phases.axes[0].patches]
    assert widths == pytest.approx([1e3 * s / 60 for s in (0.1, 0.3, 0.05)] * 2)
    left, right = (figure.axes[0] for figure in comparison._bars(runs))
    assert [bar.get_width() for bar in left.patches] == pytest.approx([100.0] * 2)
    assert [bar.get_width() for bar in right.patches] == pytest.approx([1.0] * 2)
    assert (left.get_xlabel(), right.get_xlabel()) == ("steps per second", "KB per step and worker")


def test_long_names_leave_room_for_the_bars(entry):
    """They are in the table; drawings have their numbers there. Dollars are no formulas."""
    runs = [entry("dense()", 0.1), entry(LONG, 0.2)]
    for figure in (comparison._phases(runs), *comparison._bars(runs)):
        page.drawing(figure)
        axes = figure.axes[0]
        assert [label.get_text() for label in axes.get_yticklabels()] == ["1 dense", "2 topk"]
        assert axes.get_position().width > 0.35
    shown = page.html(comparison.page(runs))
    assert "<svg" in shown and "2. topk(density={" in shown


def lines_across(axes):
    """What dense and 16 bits end with, as drawn: label and height."""
    return {line.get_label(): line.get_segments()[0][0][1] for line in axes.collections
            if line.get_label().startswith(("dense", "16 bits"))}  # fmt: skip


def test_every_picture_of_accuracy_has_dense_and_16_bits(entry):
    runs = [entry("dense()", 0.1), entry("half()", 0.1), entry("topk()", 0.2)]
    groups = by_recipe([run.outcome for run in runs])
    wanted = {"dense: 90 %": 0.9, "16 bits (half): 90 %": 0.9}
    for across in ("step", "bytes_sent", "elapsed"):
        assert lines_across(comparison._curves(runs, across, "accuracy").axes[0]) == wanted
        assert not lines_across(comparison._curves(runs, across, "loss").axes[0])
    assert lines_across(comparison._scatter(groups, "accuracy").axes[0]) == wanted


def test_a_reference_has_the_deviation_of_its_seeds_as_a_band(entry):
    made = entry("dense()", 0.1).outcome
    seeds = [replace(made, figures={"accuracy": value}) for value in (0.6, 0.8)]
    _, axes = style.plain_figure(4, 3)
    draw_references(axes, {"dense()": seeds}, "accuracy")
    (band,) = axes.patches
    half = statistics.stdev((0.6, 0.8))
    assert band.get_y() == pytest.approx(0.7 - half)
    assert band.get_height() == pytest.approx(2 * half)


def test_what_would_be_one_point_is_a_sentence(entry):
    alone = [entry("dense()", 0.1)]
    shown = page.html(comparison.page(alone))
    assert "dense() ends with accuracy 90 %, 0.06 MB sent by a worker" in shown
    assert shown.count("<svg") == 7  # phases and curves
    short = [replace(run, records=run.records[:1]) for run in alone]
    assert page.html(comparison.page(short)).count("<svg") == 1


def test_the_front_is_what_nothing_beats_in_both():
    points = {"a": (1.0, 0.7), "b": (2.0, 0.8), "c": (4.0, 0.6), "d": (4.0, 0.75), "e": (9.0, 0.5)}
    assert front(points, lower=False) == ["b", "d", "e"]
    assert front(points, lower=True) == ["e"]


def test_names_of_points_cover_no_other_name():
    _, axes = style.plain_figure(5, 4)
    points = [(1 + 0.02 * n, 0.5 + 0.001 * n, f"recipe {n}", style.INK) for n in range(6)]
    axes.plot([0, 3], [0, 1])
    style.place_notes(axes, points, [])
    boxes = [note.get_window_extent() for note in axes.texts]
    assert all(box.count_overlaps(boxes) == 1 for box in boxes)  # itself
