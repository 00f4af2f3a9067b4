"""A plan as a page: the ranked table, the timelines, and where the answer would change."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from thinwire.plan import planner
from thinwire.plan.planner import DENSE, Option, Setup
from thinwire.plan.profile import Cost
from thinwire_lab.report.page import Page, Section, drawing
from thinwire_lab.report.style import FAINT, HUES, INK, PAPER, blank, legend_below
from thinwire_lab.simulate import scale

RATES = tuple(10 ** (7 + i / 4) for i in range(21))  # 10 Mbit/s to 1 Tbit/s
WORLDS = tuple(2**power for power in range(1, 11))
FAR = tuple(2**power for power in range(1, 17))
COLOURS = {"forward": "#c7ccd6", "backward": "#8d95a5", "optimizer": "#c7ccd6",
           "select": "#d9822b", "exchange": "#3267b1", "write": "#4f9d69"}  # fmt: skip


def page(
    title: str, setup: Setup, costs: Mapping[str, Sequence[Cost]], options: Sequence[Option]
) -> Page:
    """The whole answer, with what it rests on."""
    best = planner.choose(options)
    dense = next(option for option in options if option.recipe == DENSE)
    shown = [dense] if best is dense else [best, dense]
    measured = setup.network.world
    sections = [
        *(
            Section(title=name, table=rows, best=options.index(best) if number == 0 else -1)
            for number, (name, rows) in enumerate(tables(options, setup).items())
        ),
        Section(title="Bucket by bucket", points=planner.reasons(best, dense)),
        Section(title="One step", drawings=[drawing(_timelines(shown))]),
        Section(
            title="If the network were another",
            text=[f"{measured} workers; the messages cost as much as here. {DASHES}"],
            drawings=[drawing(_lines(_by_rate(setup, costs), options, "bits per second"))],
        ),
        Section(
            title="If there were more workers",
            text=[f"The same links, and one more machine for every worker. {DASHES}"],
            drawings=[drawing(_lines(_by_world(setup, costs), options, "workers"))],
        ),
        Section(
            title="Who would win, up to 65,536 workers",
            text=["Closed forms of the published methods, with this model's times. Speed only: "
                  "what they cost in accuracy is not in it."],
            drawings=[drawing(_map(setup, costs))],
        ),
        Section(title="Links", table=links(setup)),
    ]  # fmt: skip
    return Page(title=title, lead=planner.verdict(options, setup), sections=sections)


DASHES = "Dashed: costs more accuracy than tolerated, or nobody recorded it."


def tables(options: Sequence[Option], setup: Setup) -> dict[str, list[list[str]]]:
    """What is printed, and what is drawn: the recipes to choose from, and below them the others."""
    dense = next(option for option in options if option.recipe == DENSE)
    under = "any optimizer" if setup.optimizer is None else setup.optimizer
    names = {
        True: f"Within {setup.tolerance:g} % of dense in recorded trainings ({under})",
        False: "Not recommended: costs more, or was never recorded",
    }
    return {
        name: table(some, dense)
        for keeps, name in names.items()
        if (some := [option for option in options if option.keeps == keeps])
    }


def table(options: Sequence[Option], dense: Option) -> list[list[str]]:
    """A row per recipe, below its head."""
    rows = [["recipe", "ms", "x faster", "cost in accuracy", "exposed", "MB sent", "MB held",
             "pays below"]]  # fmt: skip
    for option in options:
        sent = f"{'>= ' * option.floor}{option.sent / 1e6:.2f}"
        speed = planner.about(dense.step / option.step).removeprefix("about ").removesuffix(" x")
        rows.append([
            option.recipe, f"{1e3 * option.step:.1f}", speed, planner.price(option),
            f"{1e3 * option.timeline.exposed:.1f}", sent,
            f"{option.memory / 1e6:.1f}", "" if option is dense else crossing(option.crossover),
        ])  # fmt: skip
    return rows


def crossing(bits: float) -> str:
    """A rate as people write it."""
    if bits == 0:
        return "never"
    if math.isinf(bits):
        return "always"
    for unit, size in (("Tbit/s", 1e12), ("Gbit/s", 1e9), ("Mbit/s", 1e6)):
        if bits >= 0.999 * size:  # rounding is not another unit
            return f"{bits / size:.3g} {unit}"
    return f"{bits / 1e3:.3g} kbit/s"


def links(setup: Setup) -> list[list[str]]:
    """The line of every verb, and how far it is off."""
    rows = [["verb", "alpha, us per message", "beta, ns per byte", "Gbit/s", "fit off by"]]
    for verb, line in setup.network.lines.items():
        rate = f"{8 / line.beta / 1e9:.2f}" if line.beta else ""
        off = f"{100 * line.error:.0f} %" if line.points else ""
        rows.append([verb, f"{1e6 * line.alpha:.0f}", f"{1e9 * line.beta:.3f}", rate, off])
    return rows


Curves = dict[str, list[tuple[float, float]]]


def _by_rate(setup: Setup, costs: Mapping[str, Sequence[Cost]]) -> Curves:
    def step(call: str, rate: float) -> float:
        there = replace(setup, network=setup.network.at_rate(rate))
        return planner.predict(call, there, costs[call]).step

    return _curves(step, costs, RATES)


def _by_world(setup: Setup, costs: Mapping[str, Sequence[Cost]]) -> Curves:
    def step(call: str, world: float) -> float:
        there = replace(setup, network=setup.network.at(int(world)))
        moved = planner.move(call, there, costs[call], setup.network.world)
        return planner.predict(call, there, moved).step

    return _curves(step, costs, WORLDS)


def _curves(
    step: Callable[[str, float], float], calls: Mapping[str, object], places: Sequence[float]
) -> Curves:
    """How many times faster than dense every recipe is at these places."""
    dense = [step(DENSE, place) for place in places]
    return {
        call: [(x, one / step(call, x)) for x, one in zip(places, dense, strict=True)]
        for call in calls
        if call != DENSE
    }


def _open(axes: Any) -> None:
    """No lines above and to the right."""
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _timelines(options: Sequence[Option]) -> Any:
    figure = blank(9.5, 1.5 * len(options) + 0.5)
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
        _open(axes)
    axes.set_xlabel("ms", fontsize=8)
    from matplotlib.patches import Patch

    marks = [
        Patch(color=colour, label=what) for what, colour in COLOURS.items() if what != "optimizer"
    ]
    figure.legend(
        handles=marks, fontsize=7, ncols=len(marks), loc="outside lower center", frameon=False
    )
    return figure


def _lines(curves: Curves, options: Sequence[Option], label: str) -> Any:
    figure = blank(9.5, 3.2 + 0.16 * len(curves))
    axes = figure.subplots()
    safe = {option.recipe for option in options if option.keeps}
    for number, (call, curve) in enumerate(curves.items()):
        hue, style = HUES[number % len(HUES)], "-" if call in safe else "--"
        x, y = zip(*curve, strict=True)
        axes.plot(x, y, style, color=hue, label=call, lw=1.6)
    axes.axhline(1.0, color=FAINT, lw=1, ls=":")
    axes.set_xscale("log", base=2 if label == "workers" else 10)
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    if label == "workers":
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel(label, fontsize=8)
    axes.set_ylabel("times faster than dense", fontsize=8, color=INK)
    axes.tick_params(labelsize=8)
    legend_below(figure, axes)
    _open(axes)
    return figure


def _map(setup: Setup, costs: Mapping[str, Sequence[Cost]]) -> Any:
    training, cluster = far(setup, costs)
    won = scale.winners(training, cluster, FAR, RATES)
    names = sorted({name for row in won for name in row})
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    hues = [*HUES, "#c2a83e", "#d48aa0", "#5b8c5a", "#444a58"][: len(names)]
    figure = blank(9.5, 3.6)
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
