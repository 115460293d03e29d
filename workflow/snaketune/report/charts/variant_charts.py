"""The picture of the variants: which comes first, how far its answers moved, and what each key that differs does."""

import math

from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

from snaketune.report.charts.style import COLOURS, Chart, Panel, Style, message
from snaketune.report.compare.differing_keys import WATCHED
from snaketune.report.compare.scores import Measure
from snaketune.report.compare.variants import Variants
from snaketune.report.data.preference_shift import Change
from snaketune.report.text import NOTHING

ROW, NAME_CHARACTERS = 0.24, 34
MUTED = COLOURS["muted"][0]


def variants_chart(found: Variants, changes: list[Change], styles: dict[str, Style]) -> Chart:
    """A row per variant for what they are sorted by and for what they gained; and what they are sorted by over each key."""
    measure = found.sorted_by or next((column for column in found.columns if column.unit == "share"), None)
    panels = [] if measure is None else [_ranking(found, measure, styles)]
    panels += [_gains(found, changes, styles)] if changes else []
    # Of two, the ranking says it all.
    if measure is not None and len(found.labels) > 2:
        panels += [_over(key, found, measure, styles) for key in found.keys if key not in WATCHED]
    return Chart(
        name="variants",
        panels=panels or [message("No run was evaluated.")],
        key={label: styles[label] for label in found.labels} if panels else {},
    )


def _ranking(found: Variants, measure: Measure, styles: dict[str, Style]) -> Panel:
    """Where each variant stands, on its 95 % interval where it has one."""

    def draw(ax: Axes) -> None:
        for row, label in enumerate(found.labels):
            value, style = measure.values[label], styles[label]
            if value is None:
                continue
            low, high = measure.interval(label) or (value, value)
            ax.plot([low, high], [row, row], color=style.hex, linewidth=1.2, alpha=0.5)
            _dot(ax, value, row, style, label == found.best, label in found.stopped)
        _rows(ax, found)
        if measure.unit == "share":
            ax.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))

    title = f"{measure.on}: {measure.name}"
    if found.best:
        title += f", {measure.shown(found.best)} at best (ringed)"
    return Panel(title=title, draw=draw, height=_height(found))


def _gains(found: Variants, changes: list[Change], styles: dict[str, Style]) -> Panel:
    """How much likelier each variant made chosen and rejected completions: a margin can grow while both fall."""
    first = changes[0]
    of = {one.label: one for one in changes if (one.evaluation, one.corpus) == (first.evaluation, first.corpus)}

    def draw(ax: Axes) -> None:
        ax.axvline(0.0, color=MUTED, linewidth=0.8, linestyle=":")
        for row, label in enumerate(found.labels):
            if label in found.stopped:
                # What went wrong by a hundred nats would hide what the others did.
                ax.text(0.02, row, "ended early", color=MUTED, va="center", transform=ax.get_yaxis_transform())
            elif label in of:
                style, (chosen, rejected) = styles[label], of[label].gains
                ax.plot([rejected, chosen], [row, row], color=style.hex, linewidth=1.2, alpha=0.5)
                ax.plot(chosen, row, color=style.hex, marker="o", markersize=5)
                ax.plot(rejected, row, color=style.hex, marker="o", markersize=5, markerfacecolor="none")
        _rows(ax, found)
        ax.set_xlabel("log-probability gained, nats")

    return Panel(
        title=f"{first.corpus}: chosen (full) and rejected (hollow) since before", draw=draw, height=_height(found)
    )


def _over(key: str, found: Variants, measure: Measure, styles: dict[str, Style]) -> Panel:
    """The measure over one key: its values in their order, those that are numbers by size, each at the same distance."""
    texts = found.keys[key]
    order = sorted(set(texts.values()), key=_by_size)

    def draw(ax: Axes) -> None:
        for label in found.labels:
            value = measure.values[label]
            if value is not None:
                place = order.index(texts[label])
                _dot(ax, place, value, styles[label], label == found.best, label in found.stopped)
        ax.set_xticks(range(len(order)), [_cut(text, 16) for text in order])
        ax.set_xlim(-0.5, len(order) - 0.5)
        ax.set(xlabel=_cut(key), ylabel=_cut(measure.name))
        if measure.unit == "share":
            ax.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
        ax.grid(False, axis="x")

    return Panel(title=f"{measure.name}, by {key}", draw=draw)


def _by_size(text: str) -> tuple[int, float, str]:
    try:
        return 1, float(text), text
    except ValueError:
        return (0 if text == NOTHING else 2), math.inf, text


def _dot(ax: Axes, x: float, y: float, style: Style, best: bool, stopped: bool) -> None:
    ax.plot(x, y, color=style.hex, marker="x" if stopped else style.marker, markersize=5)
    if best:
        ax.plot(x, y, color=COLOURS["ink"][0], marker="o", markersize=10, markerfacecolor="none", markeredgewidth=1)


def _rows(ax: Axes, found: Variants) -> None:
    ax.set_yticks(range(len(found.labels)), [_cut(found.names[label]) for label in found.labels])
    ax.set_ylim(len(found.labels) - 0.5, -0.5)
    ax.tick_params(axis="y", labelcolor=COLOURS["ink"][0])
    ax.grid(False, axis="y")


def _height(found: Variants) -> float:
    return max(1.6, 0.7 + ROW * len(found.labels))


def _cut(text: str, limit: int = NAME_CHARACTERS) -> str:
    return text if len(text) <= limit else f"{text[: limit - 1]}…"
