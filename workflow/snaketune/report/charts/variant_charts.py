"""Charts that compare the DPO runs: ranking, log-probability gains, and the measure over each key that differs."""

import math

from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

from snaketune.report.charts.style import COLOURS, Chart, Panel, Style, message
from snaketune.report.compare.differing_keys import MONITORED
from snaketune.report.compare.scores import Measure
from snaketune.report.compare.variants import Variants
from snaketune.report.data.preference_shift import PreferenceChange
from snaketune.report.text import NOTHING

ROW, NAME_CHARACTERS = 0.24, 34
MUTED = COLOURS["muted"][0]


def variants_chart(variants: Variants, changes: list[PreferenceChange], styles: dict[str, Style]) -> Chart:
    """The ranking, the gains per variant, and the ranking measure over each key that differs."""
    measure = variants.sorted_by or next((column for column in variants.columns if column.unit == "share"), None)
    panels = [] if measure is None else [_ranking(variants, measure, styles)]
    panels += [_gains(variants, changes, styles)] if changes else []
    # For two runs the ranking suffices.
    if measure is not None and len(variants.labels) > 2:
        panels += [_by_key(key, variants, measure, styles) for key in variants.keys if key not in MONITORED]
    return Chart(
        name="variants",
        panels=panels or [message("No run was evaluated.")],
        key={label: styles[label] for label in variants.labels} if panels else {},
    )


def _ranking(variants: Variants, measure: Measure, styles: dict[str, Style]) -> Panel:
    """The measure of each variant, with its 95 % interval where known."""

    def draw(ax: Axes) -> None:
        for row, label in enumerate(variants.labels):
            value, style = measure.values[label], styles[label]
            if value is None:
                continue
            low, high = measure.interval(label) or (value, value)
            ax.plot([low, high], [row, row], color=style.hex, linewidth=1.2, alpha=0.5)
            _dot(ax, value, row, style, label == variants.best, label in variants.stopped)
        _rows(ax, variants)
        if measure.unit == "share":
            ax.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))

    title = f"{measure.on}: {measure.name}"
    if variants.best:
        title += f", best {measure.shown(variants.best)} (ringed)"
    return Panel(title=title, draw=draw, height=_height(variants))


def _gains(variants: Variants, changes: list[PreferenceChange], styles: dict[str, Style]) -> Panel:
    """The mean log-probability gain of chosen and rejected completions: a margin can grow while both fall."""
    first = changes[0]
    changes_of = {one.label: one for one in changes if (one.evaluation, one.corpus) == (first.evaluation, first.corpus)}

    def draw(ax: Axes) -> None:
        ax.axvline(0.0, color=MUTED, linewidth=0.8, linestyle=":")
        for row, label in enumerate(variants.labels):
            if label in variants.stopped:
                # A diverged run would compress the scale of the others.
                ax.text(0.02, row, "stopped early", color=MUTED, va="center", transform=ax.get_yaxis_transform())
            elif label in changes_of:
                style, (chosen, rejected) = styles[label], changes_of[label].gains
                ax.plot([rejected, chosen], [row, row], color=style.hex, linewidth=1.2, alpha=0.5)
                ax.plot(chosen, row, color=style.hex, marker="o", markersize=5)
                ax.plot(rejected, row, color=style.hex, marker="o", markersize=5, markerfacecolor="none")
        _rows(ax, variants)
        ax.set_xlabel("mean log-prob gain, nats")

    return Panel(
        title=f"{first.corpus}: log-prob gain of chosen (full) and rejected (hollow)",
        draw=draw,
        height=_height(variants),
    )


def _by_key(key: str, variants: Variants, measure: Measure, styles: dict[str, Style]) -> Panel:
    """The measure over the values of one key, equally spaced; numbers are sorted by size."""
    texts = variants.keys[key]
    order = sorted(set(texts.values()), key=_by_size)

    def draw(ax: Axes) -> None:
        for label in variants.labels:
            value = measure.values[label]
            if value is not None:
                position = order.index(texts[label])
                _dot(ax, position, value, styles[label], label == variants.best, label in variants.stopped)
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


def _rows(ax: Axes, variants: Variants) -> None:
    ax.set_yticks(range(len(variants.labels)), [_cut(variants.names[label]) for label in variants.labels])
    ax.set_ylim(len(variants.labels) - 0.5, -0.5)
    ax.tick_params(axis="y", labelcolor=COLOURS["ink"][0])
    ax.grid(False, axis="y")


def _height(variants: Variants) -> float:
    return max(1.6, 0.7 + ROW * len(variants.labels))


def _cut(text: str, limit: int = NAME_CHARACTERS) -> str:
    return text if len(text) <= limit else f"{text[: limit - 1]}…"
