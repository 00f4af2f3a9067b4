"""A trace as a picture: who sends to whom, one step as it went by, messages by size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from thinwire_lab.report import style
from thinwire_lab.report.style import HUES, INK, PAPER, TINY
from thinwire_lab.trace import patterns
from thinwire_lab.trace.record import Trace

SHOWN = 8  # ranks up to which numbers are written into the matrix


def draw(trace: Trace, path: Path) -> None:
    """Three panels in a PNG: the matrix and the sizes, and the step below them."""
    figure = style.blank(style.COLUMN, 5.2 + 0.12 * len(trace.events))
    panels = figure.subplot_mosaic([["matrix", "sizes"], ["step", "step"]], width_ratios=(1.1, 1))
    _matrix(panels["matrix"], trace)
    _sizes(panels["sizes"], trace)
    _waterfall(panels["step"], trace)
    setting = trace.setting
    where = "loopback" if setting.net == "none" else setting.net
    text = f"{trace.params:,} parameters, {setting.world} workers, {where}"
    figure.suptitle(f"{style.wrap(style.as_text(setting.call))}\n{text}", fontsize=style.SMALL,
                    color=INK, x=0.01, ha="left")  # fmt: skip
    style.save(figure, path)


def _matrix(axes: Any, trace: Trace) -> None:
    table = patterns.matrix(trace)
    axes.imshow(table, cmap="Blues", vmin=0)
    style.label(axes, title="KB per step, row to column")
    top = max(max(row) for row in table) or 1.0
    if len(table) <= SHOWN:
        for rank, row in enumerate(table):
            for peer, size in enumerate(row):
                if size:
                    shade = PAPER if size > 0.6 * top else INK
                    text = f"{size / 1e3:.0f}" if size >= 1e4 else f"{size / 1e3:.1f}"
                    axes.text(peer, rank, text, ha="center", va="center", fontsize=7, color=shade)
    axes.set_xticks(range(len(table)))
    axes.set_yticks(range(len(table)))
    axes.tick_params(labelsize=TINY, colors=INK, length=0)


def _waterfall(axes: Any, trace: Trace) -> None:
    """The last step: a bar a call, waiting for others included."""
    step = trace.setting.steps - 1
    calls = [[e for e in events if e.step == step] for events in trace.events]
    start = min((e.begin for mine in calls for e in mine), default=0.0)
    names = list(dict.fromkeys(e.phase for mine in calls for e in mine))
    for rank, mine in enumerate(calls):
        for e in mine:
            hue = HUES[names.index(e.phase) % len(HUES)]
            bar = (1e3 * (e.begin - start), max(1e3 * e.seconds, 0.02))
            axes.broken_barh([bar], (rank - 0.36, 0.72), color=hue, linewidth=0)
    for number, name in enumerate(names):
        axes.plot([], [], color=HUES[number % len(HUES)], linewidth=4, label=name)
    if names:
        style.legend_below(axes.get_figure(root=True), axes, min(4, len(names)))
    style.plain(axes, grid=False)
    style.label(axes, "ms", "rank", "the last step (waiting included)")
    axes.set_yticks(range(len(calls)))
    axes.invert_yaxis()


def _sizes(axes: Any, trace: Trace) -> None:
    counted = patterns.sizes(trace)
    if len(counted) < 2:  # one bar says less than a sentence
        axes.set_axis_off()
        told = [f"{count:,} messages,\neach up to {_short(size)} bytes" for size, count in counted]
        axes.text(0.5, 0.5, *told or ["no messages"], ha="center", va="center", color=INK,
                  fontsize=style.SMALL, transform=axes.transAxes)  # fmt: skip
        return
    places = range(len(counted))
    axes.bar(places, [count for _, count in counted], color=HUES[0], width=0.8)
    every = max(1, len(counted) // 4)
    axes.set_xticks(list(places)[::every])
    axes.set_xticklabels([_short(size) for size, _ in counted][::every])
    style.plain(axes, grid=False)
    style.label(axes, title="messages by size (bytes up to)")


def _short(size: int) -> str:
    if size >= 2**20:
        return f"{size // 2**20}M"
    return f"{size // 1024}K" if size >= 1024 else str(size)
