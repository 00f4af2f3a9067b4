"""What a comparison draws is what was logged, on the axes it names."""

from __future__ import annotations

import statistics

import pytest

from thinwire.report import compared, page

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
        figure = compared._curves(runs, across, name)
        (axes,) = figure.axes
        assert axes.get_xlabel() == label and axes.get_ylabel() == name
        for line, run in zip(axes.lines, runs, strict=True):
            records = run.losses if name == "loss" else run.scores
            assert list(line.get_xdata()) == [r[across] / scale for r in records]
            last = [r[name] for r in records][-compared.SMOOTH if name == "loss" else -1 :]
            assert line.get_ydata()[-1] == pytest.approx(statistics.mean(last))


def test_bars_are_as_long_as_what_they_stand_for(entry):
    runs = [entry("dense()", 0.1), entry(LONG, 0.2)]
    phases = compared._phases(runs)
    widths = [bar.get_width() for bar in phases.axes[0].patches]
    assert widths == pytest.approx([1e3 * s / 60 for s in (0.1, 0.3, 0.05)] * 2)
    left, right = compared._bars(runs).axes
    assert [bar.get_width() for bar in left.patches] == pytest.approx([100.0] * 2)
    assert [bar.get_width() for bar in right.patches] == pytest.approx([1.0] * 2)
    assert (left.get_xlabel(), right.get_xlabel()) == ("steps a second", "KB a step from a worker")


def test_long_names_leave_room_for_the_bars(entry):
    """They are in the table; drawings have their numbers there. Dollars are no formulas."""
    runs = [entry("dense()", 0.1), entry(LONG, 0.2)]
    for figure in (compared._phases(runs), compared._bars(runs)):
        page.drawing(figure)
        axes = figure.axes[0]
        assert [label.get_text() for label in axes.get_yticklabels()] == ["1 dense", "2 topk"]
        assert axes.get_position().width > 0.35
    shown = page.html(compared.page(runs))
    assert "<svg" in shown and "2. topk(density={" in shown
