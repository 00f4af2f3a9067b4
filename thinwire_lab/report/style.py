"""How every drawing looks: a colour and a mark per family of recipes, sizes, and shared parts."""

from __future__ import annotations

import io
import textwrap
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinwire_lab import files

PAPER, INK, FAINT, GRID = "#ffffff", "#1f2430", "#8a92a0", "#e1e4ea"
# What is no recipe: phases, verbs. Colours of all kinds are apart for colour-blind eyes too.
HUES = ("#00559e", "#dd7b13", "#008c5f", "#ba3200", "#8c2067", "#0ea9f2", "#a67c52", "#6b7280")
PHASES = {"select": HUES[1], "exchange": HUES[0], "scatter": HUES[2]}
TINY, SMALL, TEXT = 8.5, 9.5, 10.5  # points; a drawing is at most COLUMN wide, so phones show them
COLUMN = 5.2  # inches
DPI = 160
WRAP = 66  # letters of a legend's line
DASHES = ("-", "--", ":", "-.")  # for recipes of one family
KINDS = ("png", "svg", "pdf")


@dataclass(frozen=True)
class Family:
    """Recipes that save bytes in the same way: they look alike in every drawing."""

    name: str
    colour: str
    mark: str
    recipes: tuple[str, ...] = ()


DENSE = Family("dense", INK, "s", ("ddp", "dense"))
HALF = Family("16 bits", "#8893a0", "D", ("fp16-hook", "half", "bf16"))
OTHER = Family("other", "#a67c52", "d")
FAMILIES = (
    DENSE,
    HALF,
    Family("4 to 8 bits", "#00559e", "X", ("int8", "fp8", "natural", "int4", "qsgd")),
    Family("1 or 2 bits", "#8c2067", "p", ("onebit", "signsgd", "terngrad")),
    Family("sparse, own choice", "#dd7b13", "^", (
        "topk", "threshold", "dgc", "gaussiank", "redsync", "sidco", "adtopk", "demo_dct",
        "randomk")),
    Family("sparse, merged", "#ba3200", "o", ("gtopk", "topkdsa", "oktopk", "slots", "spardl")),
    Family("low rank", "#008c5f", "P", ("powersgd", "acpsgd", "powersgd-hook")),
    Family("chosen by thinwire", "#0ea9f2", "<", ("auto", "tuned")),
)  # fmt: skip

NAMES = {"ddp": "PyTorch DDP", "fp16-hook": "fp16 hook", "powersgd-hook": "PowerSGD hook"}

# On dark paper. A page names colours by what they are on light paper; see `page.drawing`.
DARK = {PAPER: "#14171d", INK: "#e6e8ee", FAINT: "#7f8796", GRID: "#2c313c", "#000000": "#e6e8ee",
        "#8893a0": "#a7a9ba", "#00559e": "#277fc7", "#8c2067": "#a64e83", "#dd7b13": "#ff882f",
        "#ba3200": "#f14650", "#008c5f": "#28b988", "#0ea9f2": "#99c8f7", "#6b7280": "#a7a9ba",
        "#a67c52": "#c79d72"}  # fmt: skip


def name_of(recipe: str) -> str:
    """The word before the bracket of a recipe call."""
    return recipe.split("(")[0]


def family(recipe: str) -> Family:
    """The family of a recipe call; `OTHER` for one that is not ours."""
    name = name_of(recipe)
    return next((one for one in FAMILIES if name in one.recipes), OTHER)


def looks(recipes: Iterable[str]) -> dict[str, dict[str, Any]]:
    """How to draw the line of each recipe: colour and mark of its family, and a dash of its own."""
    made: dict[str, dict[str, Any]] = {}
    seen: Counter[Family] = Counter()
    for recipe in dict.fromkeys(recipes):
        one = family(recipe)
        made[recipe] = {"color": one.colour, "marker": one.mark, "markersize": 3.5,
                        "linewidth": 1.5, "linestyle": DASHES[seen[one] % len(DASHES)]}  # fmt: skip
        seen[one] += 1
    return made


def blank(width: float, height: float) -> Any:
    """A figure of so many inches, without axes yet."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), facecolor=PAPER, layout="constrained")


def plain_figure(width: float, height: float) -> tuple[Any, Any]:
    """A figure with one pair of axes."""
    figure = blank(width, height)
    axes = figure.subplots()
    plain(axes)
    return figure, axes


def plain(axes: Any, *, grid: bool = True) -> None:
    """Two spines, quiet ticks, and a grid behind what is drawn."""
    axes.set_facecolor(PAPER)
    axes.tick_params(colors=INK, labelsize=SMALL, length=2)
    if grid:
        axes.grid(color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(FAINT)


def label(axes: Any, across: str = "", up: str = "", title: str = "") -> None:
    """The words of a drawing, in the sizes that all drawings have."""
    axes.set_xlabel(across, fontsize=SMALL, color=INK)
    axes.set_ylabel(up, fontsize=SMALL, color=INK)
    axes.set_title(as_text(title), fontsize=SMALL, color=INK, loc="left")


def as_text(name: str) -> str:
    """A name for a drawing, where a pair of dollars would be a formula."""
    return name.replace("$", r"\$")


def in_percent(axis: Any) -> None:
    """Ticks of shares as percent."""
    axis.set_major_formatter(lambda value, _: f"{100 * value:g} %")


def in_numbers(axis: Any) -> None:
    """Ticks of a logarithmic axis as people write numbers: 1, 2, 5, 10."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_minor_formatter(NullFormatter())


def legend_below(figure: Any, axes: Any, columns: int = 1) -> None:
    """Names of recipes may be long: they get the whole width, and cover no curve."""
    handles, names = axes.get_legend_handles_labels()
    figure.legend(handles, [wrap(name) for name in names], loc="outside lower left",
                  fontsize=TINY, frameon=False, labelspacing=0.35, columnspacing=1.2,
                  handlelength=2.6, labelcolor=INK, ncols=columns)  # fmt: skip


def wrap(name: str) -> str:
    """A long name in lines that fit a drawing."""
    return "\n".join(textwrap.wrap(name, WRAP, subsequent_indent="   "))


def lines_of(names: Collection[str], columns: int = 1) -> float:
    """Inches that a legend of these names takes below a drawing."""
    lines = sum(1 + wrap(name).count("\n") for name in names)
    return 0.17 * -(-lines // columns)


def place_notes(
    axes: Any, notes: Sequence[tuple[float, float, str, str]], others: Sequence[tuple[float, float]]
) -> None:
    """Write each text beside its point, where it covers no other text, and no point if it can."""
    figure = axes.get_figure(root=True)
    figure.draw_without_rendering()  # axes have their place from here on
    points = [axes.transData.transform(point) for point in [*others, *(n[:2] for n in notes)]]
    frame = axes.bbox.padded(4)
    taken: list[Any] = []
    for x, y, text, colour in notes:
        made = write(axes, as_text(text), (x, y), (0, 0), colour, TINY)
        costs = []
        for place in _PLACES:
            box = _move(made, *place)
            outside = not (frame.fully_containsx(box.x0) and frame.fully_containsx(box.x1))
            covers = sum(box.contains(*point) for point in points)
            costs.append(1000 * outside + 100 * box.count_overlaps(taken) + 10 * covers)
        best = min(range(len(costs)), key=costs.__getitem__)
        taken.append(_move(made, *_PLACES[best]).padded(1))


def write(
    axes: Any, text: str, at: tuple[float, float], off: tuple[float, float], colour: str,
    size: float,
) -> Any:  # fmt: skip
    """Bold words so many points from a place, with a halo that keeps lines from crossing them."""
    from matplotlib.patheffects import withStroke

    made = axes.annotate(text, at, off, textcoords="offset points", color=colour, fontsize=size,
                         weight="bold", ha="center", zorder=6,
                         path_effects=[withStroke(linewidth=2.5, foreground=PAPER)])  # fmt: skip
    made.set_in_layout(False)
    return made


_PLACES = [
    (x, y, side)
    for far in (6, 14, 24, 34)
    for x, y, side in ((far, -3, "left"), (0, far, "center"), (-far, -3, "right"),
                       (0, -far - 6, "center"), (far, far, "left"), (-far, far, "right"),
                       (far, -far, "left"), (-far, -far, "right"))
]  # fmt: skip


def _move(note: Any, x: float, y: float, side: str) -> Any:
    """The box that a note has there."""
    note.set_position((x, y))
    note.set_horizontalalignment(side)
    return note.get_window_extent()


def save(figure: Any, path: Path) -> None:
    """A drawing as a file of the kind its name says, whole or not at all."""
    image = io.BytesIO()
    figure.savefig(image, dpi=DPI, format=path.suffix[1:].lower(), facecolor=PAPER)
    files.write(path, image.getvalue())
