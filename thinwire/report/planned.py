"""A plan as a page: the ranked table, the timelines, and where the answer would change."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from thinwire.plan import planner, scale
from thinwire.plan.planner import DENSE, Option, Setup
from thinwire.plan.profile import Cost
from thinwire.report.page import Page, Section, drawing
from thinwire.report.pattern import FAINT, HUES, INK, PAPER

RATES = tuple(10 ** (7 + i / 4) for i in range(21))  # 10 Mbit/s to 1 Tbit/s
WORLDS = tuple(2**power for power in range(1, 11))
FAR = tuple(2**power for power in range(1, 17))
COLOURS = {"forward": "#c7ccd6", "backward": "#8d95a5", "optimizer": "#c7ccd6",
           "select": "#d9822b", "exchange": "#3267b1", "write": "#4f9d69"}  # fmt: skip


def page(
    title: str, setup: Setup, costs: Mapping[str, Sequence[Cost]], options: Sequence[Option]
) -> Page:
    best = planner.chosen(options)
    dense = next(option for option in options if option.recipe == DENSE)
    shown = [dense] if best is dense else [best, dense]
    measured = setup.network.world
    sections = [
        Section(
            title="Recipes, fastest first", table=table(options, dense), best=options.index(best)
        ),
        Section(title="Bucket by bucket", points=planner.reasons(best, dense)),
        Section(title="One step", drawings=[drawing(_timelines(shown))]),
        Section(
            title="If the network were another",
            text=[f"{measured} workers; the messages cost as much as here."],
            drawings=[drawing(_lines(_by_rate(setup, costs), "bits a second", "links"))],
        ),
        Section(
            title="If there were more workers",
            text=["The same links and one more machine for every worker, by the fitted lines."],
            drawings=[drawing(_lines(_by_world(setup, costs), "workers", "workers"))],
        ),
        Section(
            title="Who would win, up to 65,536 workers",
            text=["Closed forms of the published methods, with this model's times."],
            drawings=[drawing(_map(setup, costs))],
        ),
        Section(title="Links", table=links(setup)),
    ]
    return Page(title=title, lead=planner.verdict(options), sections=sections)


def table(options: Sequence[Option], dense: Option) -> list[list[str]]:
    """What is printed, and what is drawn."""
    rows = [["recipe", "ms", "x faster", "exposed", "MB sent", "MB held", "pays below"]]
    for option in options:
        sent = f"{'>= ' * option.floor}{option.sent / 1e6:.2f}"
        rows.append([
            option.recipe, f"{1e3 * option.step:.1f}", f"{dense.step / option.step:.2f}",
            f"{1e3 * option.timeline.exposed:.1f}", sent,
            f"{option.memory / 1e6:.1f}", "" if option is dense else crossing(option.crossover),
        ])  # fmt: skip
    return rows


def crossing(bits: float) -> str:
    if bits == 0:
        return "never"
    if math.isinf(bits):
        return "always"
    for unit, size in (("Tbit/s", 1e12), ("Gbit/s", 1e9), ("Mbit/s", 1e6)):
        if bits >= 0.999 * size:  # rounding is not another unit
            return f"{bits / size:.3g} {unit}"
    return f"{bits / 1e3:.3g} kbit/s"


def links(setup: Setup) -> list[list[str]]:
    rows = [["verb", "alpha, us a message", "beta, ns a byte", "Gbit/s", "fit off by"]]
    for verb, line in setup.network.lines.items():
        rate = f"{8 / line.beta / 1e9:.2f}" if line.beta else ""
        off = f"{100 * line.error:.0f} %" if line.points else ""
        rows.append([verb, f"{1e6 * line.alpha:.0f}", f"{1e9 * line.beta:.3f}", rate, off])
    return rows


Curves = dict[str, list[tuple[float, float]]]


def _by_rate(setup: Setup, costs: Mapping[str, Sequence[Cost]]) -> Curves:
    curves: Curves = {call: [] for call in costs if call != DENSE}
    for rate in RATES:
        there = replace(setup, network=setup.network.at_rate(rate))
        dense = planner.predicted(DENSE, there, costs[DENSE]).step
        for call, curve in curves.items():
            curve.append((rate, dense / planner.predicted(call, there, costs[call]).step))
    return curves


def _by_world(setup: Setup, costs: Mapping[str, Sequence[Cost]]) -> Curves:
    curves: Curves = {call: [] for call in costs if call != DENSE}
    here = setup.network.world
    for world in WORLDS:
        there = replace(setup, network=setup.network.at(world))

        def step(call: str, there: Setup = there, world: int = world) -> float:
            each = costs[call]
            moved = planner.moved(call, there.model, there.groups, each, world, here)
            return planner.predicted(call, there, moved).step

        dense = step(DENSE)
        for call, curve in curves.items():
            curve.append((world, dense / step(call)))
    return curves


def _figure(width: float, height: float) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), facecolor=PAPER, layout="constrained")


def _timelines(options: Sequence[Option]) -> Any:
    figure = _figure(9.5, 1.5 * len(options) + 0.5)
    longest = max(option.step for option in options)
    rows = ("main", "lane", "network")
    for axes, option in zip(
        figure.subplots(len(options), 1, squeeze=False)[:, 0], options, strict=True
    ):
        for span in option.timeline.spans:
            bar = [(1e3 * span.begin, 1e3 * (span.end - span.begin))]
            place = len(rows) - 1 - rows.index(span.where)
            axes.broken_barh(
                bar, (place + 0.1, 0.8), facecolors=COLOURS[span.what], edgecolor=PAPER, lw=0.4
            )
        axes.set_yticks([2.5, 1.5, 0.5], rows, fontsize=8)
        axes.set_xlim(0, 1.02e3 * longest)
        axes.set_title(f"{option.recipe}: {1e3 * option.step:.1f} ms", fontsize=9, loc="left")
        axes.tick_params(labelsize=8)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    axes.set_xlabel("ms", fontsize=8)
    from matplotlib.patches import Patch

    marks = [
        Patch(color=colour, label=what) for what, colour in COLOURS.items() if what != "optimizer"
    ]
    figure.legend(
        handles=marks, fontsize=7, ncols=len(marks), loc="outside lower center", frameon=False
    )
    return figure


def _lines(curves: Curves, label: str, kind: str) -> Any:
    figure = _figure(9.5, 3.4)
    axes = figure.subplots()
    for hue, (call, curve) in zip(HUES, curves.items(), strict=False):
        axes.plot([x for x, _ in curve], [y for _, y in curve], color=hue, label=call, lw=1.6)
    axes.axhline(1.0, color=FAINT, lw=1, ls="--")
    axes.set_xscale("log", base=10 if kind == "links" else 2)
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    if kind != "links":
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel(label, fontsize=8)
    axes.set_ylabel("times faster than dense", fontsize=8, color=INK)
    axes.tick_params(labelsize=8)
    axes.legend(fontsize=7, frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure


def _map(setup: Setup, costs: Mapping[str, Sequence[Cost]]) -> Any:
    training, cluster = far(setup, costs)
    won = scale.winners(training, cluster, FAR, RATES)
    names = sorted({name for row in won for name in row})
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    hues = [*HUES, "#c2a83e", "#d48aa0", "#5b8c5a", "#444a58"][: len(names)]
    figure = _figure(9.5, 3.6)
    axes = figure.subplots()
    grid = [[names.index(name) for name in row] for row in won]
    axes.imshow(grid, origin="lower", aspect="auto", cmap=ListedColormap(hues), vmin=-0.5,
                vmax=len(names) - 0.5)  # fmt: skip
    axes.set_xticks(range(len(FAR)), [f"{world:,}" for world in FAR], fontsize=7, rotation=45)
    places = range(0, len(RATES), 4)
    axes.set_yticks(places, [crossing(RATES[i]) for i in places], fontsize=7)
    axes.set_xlabel("workers", fontsize=8)
    marks = [Patch(color=hue, label=name) for name, hue in zip(names, hues, strict=True)]
    figure.legend(handles=marks, fontsize=7, loc="outside right upper", frameon=False)
    return figure


def far(setup: Setup, costs: Mapping[str, Sequence[Cost]]) -> tuple[scale.Training, scale.Cluster]:
    """This model and these links for the model of many workers."""
    model = setup.model
    sizes = [sum(model.shapes[name].numel() for name in group) for group in setup.groups]
    sparse = next((call for call in costs if "topk" in call), DENSE)
    select = sum(cost.select + cost.scatter for cost in costs[sparse]) / model.numel
    backward = sum(seconds for _, seconds in model.backward)
    training = scale.Training(
        buckets=tuple(sizes), forward=model.forward, backward=backward, select=select
    )
    line = setup.network.lines["exchange"]
    return training, scale.Cluster(world=2, between=(line.alpha, max(line.beta, 1e-13)))
