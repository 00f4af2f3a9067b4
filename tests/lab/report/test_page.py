"""The page: everything is in it, and nothing in it is somebody else's code."""

from __future__ import annotations

import os
import platform
import re
from html import unescape
from html.parser import HTMLParser

import pytest
import torch

import thinwire
from thinwire_lab.report import page, style
from thinwire_lab.report.advice import crossing
from thinwire_lab.report.page import Page, Section

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


def test_a_page_has_dark_colours_and_rules_for_paper():
    figure, axes = style.plain_figure(3, 2)
    axes.plot([1, 2], [3, 4], color=style.family("topk()").colour)
    shown = page.html(Page(title="T", lead="l", sections=[
        Section(title="S", drawings=[page.drawing(figure)])]))  # fmt: skip
    assert "@media screen and (prefers-color-scheme: dark)" in shown and "@media print" in shown
    (light,) = {style.family("topk()").colour}
    assert f"stroke: var(--x{light[1:]}, {light})" in shown  # light where nothing else is set
    assert f"--x{light[1:]}: {style.DARK[light]};" in shown


def test_a_page_says_where_it_comes_from_and_no_folder_of_it(monkeypatch):
    given = ["--out", "/home/me/x", "--config=/home/me/run.toml", "--recipe", "topk(density=.1)"]
    monkeypatch.setattr("sys.argv", ["/opt/bin/thinwire", "compare", "mlp", *given])
    text = unescape(page.html(Page(title="T", lead="l")))
    command = "thinwire compare mlp --out x --config=run.toml --recipe 'topk(density=.1)'"
    assert f"<code>{command}</code>" in text and "/home" not in text and "/opt" not in text
    assert re.search(r"Made \d{4}-\d\d-\d\d \d\d:\d\d UTC by", text)
    for word in (f"thinwire {thinwire.__version__}", f"torch {torch.__version__}",
                 f"Python {platform.python_version()}", f"{os.cpu_count()} cores",
                 "GB of memory"):  # fmt: skip
        assert word in text
    assert platform.node() not in text.replace("thinwire", "")
