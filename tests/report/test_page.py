"""The page: everything is in it, and nothing in it is somebody else's code."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest

from thinwire.report import page
from thinwire.report.page import Page, Section
from thinwire.report.planned import crossing

pytest.importorskip("matplotlib")


def test_text_is_escaped_and_tables_are_tables(tmp_path):
    section = Section(
        title="Table", text=["a < b"], table=[["x", "y"], ["<script>", "2"], ["3", "4"]], best=1,
        points=["first"],
    )  # fmt: skip
    path = tmp_path / "page.html"
    page.write(Page(title="T & co", lead="lead", sections=[section]), path)
    text = path.read_text()
    assert "<script>" not in text and "&lt;script&gt;" in text and "T &amp; co" in text
    assert text.count("<tr") == 3 and text.count('<tr class="best"') == 1
    assert list(tmp_path.iterdir()) == [path]
    HTMLParser().feed(text)


def test_drawings_are_the_same_every_time():
    from matplotlib.figure import Figure

    def drawn():
        figure = Figure(figsize=(2, 1))
        figure.subplots().plot([1, 2], [3, 4])
        return page.drawing(figure)

    assert drawn() == drawn()
    assert drawn().startswith("<svg") and "<metadata>" not in drawn()


@pytest.mark.parametrize(
    ("bits", "text"),
    [(0.0, "never"), (float("inf"), "always"), (1e12, "1 Tbit/s"), (2.5e9, "2.5 Gbit/s"),
     (3e6, "3 Mbit/s"), (5e4, "50 kbit/s")],
)  # fmt: skip
def test_rates_are_written_as_people_say_them(bits, text):
    assert crossing(bits) == text
