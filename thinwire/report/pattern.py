"""A trace as a picture: who sends to whom, one step as it went by, messages by size."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from thinwire.jobs import logs
from thinwire.lab import patterns
from thinwire.lab.tracing import Trace

PAPER, INK, FAINT = "#ffffff", "#1f2430", "#9aa1ad"
HUES = ("#3267b1", "#d9822b", "#4f9d69", "#b0413e", "#7b5aa6", "#3aa6a1", "#a67c52", "#6b7280")
SHOWN = 8  # ranks up to which numbers are written into the matrix


def draw(trace: Trace, path: Path) -> None:
    """Three panels in a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.1), dpi=110, facecolor=PAPER, layout="constrained")
    left, middle, right = figure.subplots(1, 3, width_ratios=(1.05, 1.9, 1.0))
    _matrix(left, trace)
    _waterfall(middle, trace)
    _sizes(right, trace)
    setting = trace.setting
    where = "loopback" if setting.net == "none" else setting.net
    figure.suptitle(
        f"{setting.call}   {trace.params:,} parameters, {setting.world} workers, {where}",
        fontsize=9, color=INK, x=0.01, ha="left",
    )  # fmt: skip
    image = io.BytesIO()
    figure.savefig(image, format="png")
    logs.written(path, image.getvalue())


def _matrix(axes: Any, trace: Trace) -> None:
    table = patterns.matrix(trace)
    axes.imshow(table, cmap="Blues", vmin=0)
    axes.set_title("KB a step, row to column", fontsize=8, color=INK)
    top = max(max(row) for row in table) or 1.0
    if len(table) <= SHOWN:
        for rank, row in enumerate(table):
            for peer, size in enumerate(row):
                if size:
                    shade = PAPER if size > 0.6 * top else INK
                    text = f"{size / 1e3:.0f}" if size >= 1e4 else f"{size / 1e3:.1f}"
                    axes.text(peer, rank, text, ha="center", va="center", fontsize=6, color=shade)
    axes.set_xticks(range(len(table)))
    axes.set_yticks(range(len(table)))
    axes.tick_params(labelsize=7, colors=INK, length=0)


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
            axes.broken_barh([bar], (rank - 0.36, 0.72), color=hue, edgecolor=PAPER, linewidth=0.3)
    for number, name in enumerate(names):
        axes.plot([], [], color=HUES[number % len(HUES)], linewidth=4, label=name)
    if names:
        axes.legend(fontsize=6, ncols=min(4, len(names)), loc="upper center",
                    bbox_to_anchor=(0.5, -0.12), frameon=False)  # fmt: skip
    axes.set_title("the last step by rank, ms (waiting included)", fontsize=8, color=INK)
    axes.set_yticks(range(len(calls)))
    axes.invert_yaxis()
    _plain(axes)


def _sizes(axes: Any, trace: Trace) -> None:
    counted = patterns.sizes(trace)
    places = range(len(counted))
    axes.bar(places, [count for _, count in counted], color=HUES[0], width=0.8)
    axes.set_xlim(-2, max(2, len(counted) + 1))  # one bar alone is not a wall
    every = max(1, len(counted) // 6)
    axes.set_xticks(list(places)[::every])
    axes.set_xticklabels([_short(size) for size, _ in counted][::every])
    axes.set_title("messages by size (bytes up to)", fontsize=8, color=INK)
    _plain(axes)


def _short(size: int) -> str:
    return (
        f"{size // 2**20}M" if size >= 2**20 else f"{size // 1024}K" if size >= 1024 else str(size)
    )


def _plain(axes: Any) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(FAINT)
    axes.tick_params(labelsize=7, colors=INK, length=2)
