"""Styles of the figures: colours, panels, and deterministic SVG.

A page holds each panel separately, so that they are stacked at a readable size on a phone.
"""

import io
import math
import re
import textwrap
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import matplotlib as mpl
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter, StrMethodFormatter

# name: (light scheme, dark scheme). Series use the colour-blind-safe palette of Okabe and Ito.
COLOURS = {
    "ink": ("#1f2430", "#e8e8ea"),
    "muted": ("#626a78", "#a2a9b5"),
    "line": ("#dde0e5", "#3a3f48"),
    "surface": ("#ffffff", "#1c1f25"),
    "data": ("#3f7f7a", "#6fb7b0"),
    "data-weak": ("#b5d3d0", "#3c5f5c"),
    "bad": ("#b3261e", "#ff8a80"),
    "base-1": ("#868d98", "#9aa1ac"),
    "base-2": ("#5c626c", "#c3c8d0"),
    "sft-1": ("#0072b2", "#4fb0ea"),
    "sft-2": ("#009e73", "#35c99d"),
    "sft-3": ("#56b4e9", "#9bd6f7"),
    "sft-4": ("#33508a", "#8aa5e0"),
    "dpo-1": ("#d55e00", "#ff9248"),
    "dpo-2": ("#cc79a7", "#eaa3ca"),
    "dpo-3": ("#e69f00", "#ffc54a"),
    "dpo-4": ("#8a3a5e", "#d487ab"),
    "merge-1": ("#6b4fa0", "#b39ddb"),
    "merge-2": ("#7a7a1f", "#c5c56a"),
    "reward-1": ("#5b7f00", "#a5cc4a"),
    "reward-2": ("#8c6d31", "#d1b06b"),
}
MUTED = COLOURS["muted"][0]
DASHES = ("-", "--", ":", "-.")
MARKERS = ("o", "D", "s", "^")
# Inches; text of 9 points stays legible when a panel is scaled to the width of a phone.
PANEL_WIDTH, PANEL_HEIGHT = 4.3, 2.6
# Above this many points, a line is drawn as medians in a band from minimum to maximum.
MANY_POINTS, BUCKETS = 2000, 400
# An id that matplotlib generated.
DIGEST = re.compile(r'(?:(?<=id=")|(?<=url\(#)|(?<=href="#))([a-zA-Z])[0-9a-f]{10}\b')
# The element that matplotlib draws, with its width and height.
ROOT = re.compile(r'<svg [^>]*?viewBox="0 0 ([\d.]+) ([\d.]+)"[^>]*>')
SETTINGS = {
    "svg.hashsalt": "report",
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.edgecolor": COLOURS["line"][0],
    "axes.labelcolor": COLOURS["muted"][0],
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "grid.color": COLOURS["line"][0],
    "grid.linewidth": 0.6,
    "text.color": COLOURS["ink"][0],
    "xtick.color": COLOURS["muted"][0],
    "ytick.color": COLOURS["muted"][0],
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "hatch.color": COLOURS["bad"][0],
    "hatch.linewidth": 0.8,
    "legend.frameon": False,
    "lines.solid_capstyle": "round",
}


@dataclass(frozen=True, kw_only=True)
class Style:
    colour: str
    dash: str = "-"
    marker: str = "o"

    @property
    def hex(self) -> str:
        return COLOURS[self.colour][0]


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One set of axes. The title states the result; `draw` draws on the axes."""

    title: str
    draw: Callable[[Axes], None]
    height: float = PANEL_HEIGHT


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Panels with a common legend (`key`)."""

    name: str
    panels: list[Panel]
    key: dict[str, Style]

    @cached_property
    def figures(self) -> list[tuple[str, Markup]]:
        """Title and SVG of each panel; drawn once."""
        return [(panel.title, panel_svg(panel, f"{self.name}-{number}")) for number, panel in enumerate(self.panels)]


def model_styles(labels: Iterable[str]) -> dict[str, Style]:
    """A style per model: grey for bases, blue and green for SFT, warm colours for DPO, violet for merged ones, olive for
    reward models. Then dashes change.

    >>> [style.colour for style in model_styles(["base:a", "sft:a", "sft:b", "dpo:a"]).values()]
    ['base-1', 'sft-1', 'sft-2', 'dpo-1']
    """
    seen: Counter[str] = Counter()
    styles = {}
    for label in labels:
        kind = label.partition(":")[0]
        colours = [name for name in COLOURS if name.startswith(f"{kind}-")]
        turn, number = divmod(seen[kind], len(colours))
        seen[kind] += 1
        styles[label] = Style(colour=colours[number], dash=DASHES[turn % 4], marker=MARKERS[turn % 4])
    return styles


def panel_svg(panel: Panel, name: str) -> Markup:
    """A panel without its title as an SVG element of a page: as wide as it is shown, in the page's font, and with CSS variables
    as colours, which follow the scheme; `name` is the prefix of its ids. matplotlib escapes the text in it."""
    with mpl.rc_context(SETTINGS):
        figure = Figure(figsize=(PANEL_WIDTH, panel.height), layout="constrained")
        panel.draw(figure.subplots())
        svg = _svg(figure, name)
    for colour, (light, _) in COLOURS.items():
        svg = svg.replace(light, f"var(--{colour})")
    svg = svg.replace("; font-family: 'DejaVu Sans'", "")
    return Markup(ROOT.sub(r'<svg viewBox="0 0 \1 \2" role="img">', svg[svg.index("<svg") :], count=1))


def trace(
    ax: Axes, steps: Sequence[float], values: Sequence[float | None], style: Style, dash: str | None = None
) -> None:
    """Draw values over steps. One point is a dot; more than MANY_POINTS are medians in a band. NaN and None are skipped."""
    known = [(x, y) for x, y in zip(steps, values) if y is not None and math.isfinite(y)]
    if not known:
        return
    x, y = (np.array(column, dtype=float) for column in zip(*known))
    look = {"color": style.hex, "linestyle": dash or style.dash, "linewidth": 1.4}
    if len(x) <= MANY_POINTS:
        ax.plot(x, y, marker=style.marker if len(x) <= 12 else None, markersize=3.5, **look)
        return
    buckets = np.array_split(np.arange(len(x)), BUCKETS)
    middle, medians = ([float(np.median(array[bucket])) for bucket in buckets] for array in (x, y))
    low, high = ([float(pick(y[bucket])) for bucket in buckets] for pick in (np.min, np.max))
    ax.fill_between(middle, low, high, color=style.hex, alpha=0.2, linewidth=0)
    ax.plot(middle, medians, **look | {"linewidth": 1.0})


def message(text: str) -> Panel:
    def draw(ax: Axes) -> None:
        ax.set_axis_off()
        centred = {"ha": "center", "va": "center", "transform": ax.transAxes}
        ax.text(0.5, 0.5, textwrap.fill(text, 44), color=MUTED, **centred)

    return Panel(title="", draw=draw, height=1.4)


def curve_with_intervals(ax: Axes, points: Iterable[tuple[float, float, Sequence[float] | None]], style: Style) -> None:
    """A curve with a marker at each point, and a vertical line for its interval. Args: points: x, y and interval."""
    points = sorted(points, key=lambda point: point[0])
    for x, _, interval in points:
        if interval:
            ax.plot([x, x], interval, color=style.hex, linewidth=1.2, alpha=0.5)
    look = {"color": style.hex, "linestyle": style.dash, "marker": style.marker}
    ax.plot([x for x, *_ in points], [y for _, y, _ in points], linewidth=1.2, markersize=4, **look)


def line_at(ax: Axes, value: float | None, vertical: bool = False) -> None:
    """Draw a dotted line at the value before anything is learned, if there is one."""
    if value is not None:
        (ax.axvline if vertical else ax.axhline)(value, color=MUTED, linewidth=0.8, linestyle=":")


def whole_numbers(ax: Axes, axis: str, ticks: int) -> None:
    """Show integers with separators on one axis; vertical grid lines would only repeat the ticks."""
    getattr(ax, f"{axis}axis").set_major_locator(MaxNLocator(ticks, integer=True, min_n_ticks=1))
    getattr(ax, f"{axis}axis").set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    ax.grid(False, axis="x")


def percentages(ax: Axes, axis: str) -> None:
    getattr(ax, f"{axis}axis").set_major_formatter(PercentFormatter(1.0, decimals=0))


def cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def _svg(figure: Figure, name: str) -> str:
    """A figure as an SVG file, with `name` as prefix of its ids."""
    buffer = io.StringIO()
    with warnings.catch_warnings():
        # The font is used only for measuring; a viewer's own font may have the missing glyphs.
        warnings.filterwarnings("ignore", message=".*missing from font.*")
        # `savefig` would draw twice, first for the layout alone.
        FigureCanvasSVG(figure).print_svg(buffer, metadata={"Date": None, "Creator": None})
    svg = re.sub(r"<metadata>.*?</metadata>", "", buffer.getvalue(), flags=re.DOTALL)
    return re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", _numbered(svg))


def _numbered(svg: str) -> str:
    """Number the ids in order of appearance.

    matplotlib derives ids from digests of clipping rectangles, whose last bits vary between runs because of the layout solver.

    >>> _numbered('<use href="#m0123456789"/><path clip-path="url(#pfedcba9876)"/><path id="m0123456789"/>')
    '<use href="#m1"/><path clip-path="url(#p2)"/><path id="m1"/>'
    """
    names: dict[str, str] = {}
    return DIGEST.sub(lambda match: names.setdefault(match[0], f"{match[1]}{len(names) + 1}"), svg)
