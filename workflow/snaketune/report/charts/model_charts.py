"""Charts that compare models: their scores (of snapshots, over the share of a run), the DPO runs, races, and the changes that
DPO made in held-out pairs.
"""

import math

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, PercentFormatter

from snaketune.evaluation.pair_scores import wins
from snaketune.publishing.measures import FORMATS, PREFERENCES, Measure, measures
from snaketune.report.charts.style import (
    COLOURS,
    MUTED,
    Chart,
    Panel,
    Style,
    curve_with_intervals,
    cut,
    line_at,
    message,
    percentages,
)
from snaketune.report.compare.variants import MONITORED, Variants
from snaketune.report.data.preference_shift import PreferenceChange
from snaketune.report.data.races import Race, paused_runs
from snaketune.report.data.results import ResultSet, unique
from snaketune.text import NOTHING, decimal, percent

Styles = dict[str, Style]
INK = COLOURS["ink"][0]
DOT_STEP, ROW_STEP = 0.085, 0.24
NAME_CHARACTERS = 34
ACCURACIES = {name for name, unit, better in PREFERENCES.values() if unit == "share" and better > 0}
BINS = 40
# The outermost bins hold everything beyond these quantiles, so that an outlier doesn't compress the rest.
TAIL = 0.005
REFERENCE, CHOSEN, REJECTED = Style(colour="base-1"), Style(colour="data"), Style(colour="bad", dash="--")


def evaluation_chart(results: ResultSet, styles: Styles) -> Chart:
    """Exact match by task, and preference accuracies, with a panel each per evaluation and corpus."""
    panels, paused = [], paused_runs(results)
    evaluations = results.all_evaluations
    for evaluation, models in evaluations.items():
        where = f" ({evaluation})" if len(evaluations) > 1 else ""
        labels, table = [scored.model for scored in models], measures(models)
        for on in unique(measure.on for measure in table):
            here = [measure for measure in table if measure.on == on]
            if exact := [measure for measure in here if measure.name.startswith("exact match")]:
                panels.append(_dots(f"{on}{where}: exact match, all and by task", exact, labels, styles))
            if preferred := [measure for measure in here if measure.name in ACCURACIES]:
                panels.append(_dots(f"{on}{where}: preference accuracy", preferred, labels, styles, middle=0.5))
        panels += learning_curves(table, labels, styles, where, paused)
    return Chart(
        name="evaluation",
        panels=panels or [message("Neither exact match nor preferences were measured.")],
        key={label: styles[label] for label in unique(one.model for models in evaluations.values() for one in models)},
    )


def _dots(title: str, rows: list[Measure], models: list[str], styles: Styles, middle: float | None = None) -> Panel:
    """A row per measure with a dot per model, each on its 95 % interval."""
    spread = DOT_STEP * (len(models) - 1)
    pitch = spread + ROW_STEP

    def draw(ax: Axes) -> None:
        line_at(ax, middle, vertical=True)
        for number, measure in enumerate(rows):
            for index, model in enumerate(models):
                y, style = number * pitch - spread / 2 + index * DOT_STEP, styles[model]
                if (value := measure.values.get(model)) is not None:
                    ax.plot(measure.intervals.get(model) or (value, value), [y, y], **_thin(style))
                    ax.plot(value, y, color=style.hex, marker=style.marker, markersize=4.5)
        ax.set_ylim((len(rows) - 0.5) * pitch, -0.5 * pitch)
        names = ["all" if row.name == "exact match" else row.name.removeprefix("exact match: ") for row in rows]
        names = [cut(" ".join(name.split()), 32) for name in names]
        ax.set_yticks([number * pitch for number in range(len(rows))], names)
        ax.tick_params(axis="y", labelcolor=INK)
        ax.set_xlim(-0.02, 1.02)
        percentages(ax, "x")
        for number in range(1, len(rows)):
            ax.axhline((number - 0.5) * pitch, color=COLOURS["line"][0], linewidth=0.6)
        ax.grid(False, axis="y")

    return Panel(title=title, draw=draw, height=max(1.6, 0.6 + pitch * len(rows)))


def _thin(style: Style) -> dict[str, object]:
    return {"color": style.hex, "linewidth": 1.2, "alpha": 0.5}


def variants_chart(variants: Variants, changes: list[PreferenceChange], styles: Styles) -> Chart:
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


def _ranking(variants: Variants, measure: Measure, styles: Styles) -> Panel:
    """The measure of each variant, with its 95 % interval where known."""

    def draw(ax: Axes) -> None:
        for row, label in enumerate(variants.labels):
            if (value := measure.values[label]) is not None:
                ax.plot(measure.intervals.get(label) or (value, value), [row, row], **_thin(styles[label]))
                _dot(ax, value, row, label, variants, styles)
        _rows(ax, variants)
        if measure.unit == "share":
            percentages(ax, "x")

    best = f", best {measure.shown(variants.best)} (ringed)" if variants.best else ""
    return Panel(title=f"{measure.on}: {measure.name}{best}", draw=draw, height=_height(variants))


def _gains(variants: Variants, changes: list[PreferenceChange], styles: Styles) -> Panel:
    """The mean log-probability gain of chosen and rejected completions: a margin can grow while both fall."""
    first = changes[0]
    changes_of = {
        change.label: change
        for change in changes
        if (change.evaluation, change.corpus) == (first.evaluation, first.corpus)
    }

    def draw(ax: Axes) -> None:
        line_at(ax, 0.0, vertical=True)
        for row, label in enumerate(variants.labels):
            if label in variants.stopped:
                # A diverged run would compress the scale of the others.
                ax.text(0.02, row, "stopped early", color=MUTED, va="center", transform=ax.get_yaxis_transform())
            elif label in changes_of:
                (chosen, rejected), look = changes_of[label].gains, {"color": styles[label].hex, "marker": "o"}
                ax.plot([rejected, chosen], [row, row], **_thin(styles[label]))
                ax.plot(chosen, row, markersize=5, **look)
                ax.plot(rejected, row, markersize=5, markerfacecolor="none", **look)
        _rows(ax, variants)
        ax.set_xlabel("mean log-prob gain, nats")

    title = f"{first.corpus}: log-prob gain of chosen (full) and rejected (hollow)"
    return Panel(title=title, draw=draw, height=_height(variants))


def _by_key(key: str, variants: Variants, measure: Measure, styles: Styles) -> Panel:
    """The measure over the values of one key, equally spaced; numbers are sorted by size."""
    texts = variants.keys[key]
    order = sorted(set(texts.values()), key=_by_size)

    def draw(ax: Axes) -> None:
        for label in variants.labels:
            if (value := measure.values[label]) is not None:
                _dot(ax, order.index(texts[label]), value, label, variants, styles)
        ax.set_xticks(range(len(order)), [cut(text, 16) for text in order])
        ax.set_xlim(-0.5, len(order) - 0.5)
        ax.set(xlabel=cut(key, NAME_CHARACTERS), ylabel=cut(measure.name, NAME_CHARACTERS))
        if measure.unit == "share":
            ax.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
        ax.grid(False, axis="x")

    return Panel(title=f"{measure.name}, by {key}", draw=draw)


def _by_size(text: str) -> tuple[int, float, str]:
    try:
        return 1, float(text), text
    except ValueError:
        return (0 if text == NOTHING else 2), math.inf, text


def _dot(ax: Axes, x: float, y: float, label: str, variants: Variants, styles: Styles) -> None:
    """Draw the dot of a run: a cross if it was stopped early, ringed if it is the best."""
    style = styles[label]
    ax.plot(x, y, color=style.hex, marker="x" if label in variants.stopped else style.marker, markersize=5)
    if label == variants.best:
        ax.plot(x, y, color=INK, marker="o", markersize=10, markerfacecolor="none", markeredgewidth=1)


def _rows(ax: Axes, variants: Variants) -> None:
    names = [cut(variants.names[label], NAME_CHARACTERS) for label in variants.labels]
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.5, -0.5)
    ax.tick_params(axis="y", labelcolor=INK)
    ax.grid(False, axis="y")


def _height(variants: Variants) -> float:
    return max(1.6, 0.7 + ROW_STEP * len(variants.labels))


def preferences_chart(changes: list[PreferenceChange], styles: Styles) -> Chart:
    """Two panels for each change: margins, then rewards."""
    several = len({(change.evaluation, change.corpus) for change in changes}) > 1
    panels, key = [], {}
    for shift in changes:
        name = f"{shift.label}, {shift.corpus} ({shift.evaluation})" if several else shift.label
        panels += [_margins(name, shift, styles), _rewards(name, shift)]
        key |= {label: styles.get(label, REFERENCE) for label in (shift.before, shift.label)}
    nothing = message("No evaluation scored a DPO run and its reference on the same pairs.")
    key |= {"chosen": CHOSEN, "rejected": REJECTED} if panels else {}
    return Chart(name="preferences", panels=panels or [nothing], key=key)


def _margins(name: str, change: PreferenceChange, styles: Styles) -> Panel:
    """Histogram of the log-prob margin per token (chosen less rejected), before and after."""
    margins = dict(zip((change.before, change.label), change.margins(per_token=True)))

    def draw(ax: Axes) -> None:
        edges = _edges(ax, *margins.values())
        for label, margins_P in margins.items():
            _steps(ax, margins_P, edges, styles.get(label, REFERENCE))
        _axes(ax, "log-prob margin (chosen less rejected), nats per token")

    shares = (percent(wins(margins_P).mean()) for margins_P in margins.values())
    return Panel(title=f"{name}: chosen preferred per token in {' → '.join(shares)}", draw=draw)


def _rewards(name: str, change: PreferenceChange) -> Panel:
    """Histogram of the rewards of chosen and rejected; also those before, unless they are all zero."""
    before_P2, after_P2 = change.rewards()
    # Log-probabilities of one model, computed twice, differ by rounding errors.
    moved_before = bool(np.abs(before_P2).max() > 0.05 * np.abs(after_P2).max())

    def draw(ax: Axes) -> None:
        edges = _edges(ax, after_P2, before_P2 if moved_before else after_P2)
        for column, style in enumerate((CHOSEN, REJECTED)):
            if moved_before:
                _steps(ax, before_P2[:, column], edges, style, filled=False)
            _steps(ax, after_P2[:, column], edges, style)
        _axes(ax, "reward, nats × beta" if change.beta else "log-prob gain, nats")

    chosen, rejected = (decimal(mean) for mean in after_P2.mean(axis=0).tolist())
    what = "mean rewards" if change.beta else "mean log-prob gains"
    before = "outlines: before" if moved_before else "before: all 0"
    return Panel(title=f"{name}: {what}, chosen {chosen}, rejected {rejected} ({before})", draw=draw)


def _edges(ax: Axes, *values: np.ndarray) -> np.ndarray:
    """Draw a line at zero, and return common bin edges of all `values`, float64[BINS + 1]."""
    line_at(ax, 0.0, vertical=True)
    low = min(float(np.quantile(array, TAIL)) for array in values)
    high = max(float(np.quantile(array, 1 - TAIL)) for array in values)
    margin = max(high - low, 1e-6) * 0.02
    return np.linspace(low - margin, high + margin, BINS + 1)


def _steps(ax: Axes, values: np.ndarray, edges: np.ndarray, style: Style, filled: bool = True) -> None:
    counts, _ = np.histogram(np.clip(values, edges[0], edges[-1]), edges)
    if filled:
        ax.stairs(counts, edges, fill=True, color=style.hex, alpha=0.3, linewidth=0)
    ax.stairs(counts, edges, color=style.hex, linestyle=style.dash if filled else ":", linewidth=1.2)


def _axes(ax: Axes, name: str) -> None:
    ax.set(xlabel=name, ylabel="pairs")
    ax.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    ax.grid(False, axis="x")


def snapshot_of(label: str) -> tuple[str, float]:
    """The run that a model is a snapshot of, and the share of its steps; 1 for the run itself.

    >>> snapshot_of("sft:demo@0.25"), snapshot_of("sft:demo")
    (('sft:demo', 0.25), ('sft:demo', 1.0))
    """
    run, _, share = label.partition("@")
    return run, float(share or 1)


def learning_curves(
    table: list[Measure], models: list[str], styles: dict[str, Style], where: str, paused: dict[str, float]
) -> list[Panel]:
    """A panel for each measure that has a direction, with a curve per run with snapshots; the initial model is at 0.

    Args:
        paused: by label, the share of its steps at which a race ended a run, or a snapshot beyond it.
    """
    runs: dict[str, list[tuple[float, str]]] = {}
    for model in models:
        if "@" in model:
            run, _ = snapshot_of(model)
            initial = f"base:{run.partition(':')[2]}"
            known = [(0.0, initial)] if run.startswith("sft:") and initial in models else []
            snapshots = [
                (paused.get(label, snapshot_of(label)[1]), label) for label in models if snapshot_of(label)[0] == run
            ]
            runs[run] = sorted(known + snapshots)
    # Perplexity is another scale of the loss.
    shown = (
        [measure for measure in table if measure.better and not measure.detail and measure.name != "perplexity"]
        if runs
        else []
    )
    return [_curve(measure, runs, styles, where) for measure in shown]


def _curve(measure: Measure, runs: dict[str, list[tuple[float, str]]], styles: dict[str, Style], where: str) -> Panel:
    def draw(ax: Axes) -> None:
        for run, points in runs.items():
            style = styles.get(run) or styles[points[-1][1]]
            known = ((x, measure.values.get(model), measure.interval(model)) for x, model in points)
            curve_with_intervals(ax, (point for point in known if point[1] is not None), style)
        ax.set(xlabel="share of the run", ylabel=f"{measure.name}, {measure.unit}" if measure.unit else measure.name)
        percentages(ax, "x")
        if FORMATS[measure.unit] is percent:
            percentages(ax, "y")

    best = max(
        ((value * measure.better, run, share) for run, points in runs.items() for share, model in points
         if (value := measure.values.get(model)) is not None), default=None,
    )  # fmt: skip
    ending = f": best {FORMATS[measure.unit](best[0] * measure.better)} at {best[2]:.0%} of {best[1]}" if best else ""
    return Panel(title=f"{measure.on}{where}: {measure.name}{ending}", draw=draw)


def race_chart(races: list[Race], styles: dict[str, Style]) -> Chart:
    """A panel per race: the score of each variant at each rung, and a cross where it was paused."""
    return Chart(
        name="race",
        panels=[_race(race, styles) for race in races],
        key={label: styles[label] for race in races for label, by_rung in race.measured.items() if by_rung},
    )


def _race(race: Race, styles: dict[str, Style]) -> Panel:
    def draw(ax: Axes) -> None:
        for label, by_rung in race.measured.items():
            if not by_rung:
                continue
            style, rungs = styles[label], sorted(by_rung)
            scores = [by_rung[rung]["mean"] for rung in rungs]
            ax.plot(rungs, scores, color=style.hex, linestyle=style.dash, marker=style.marker, markersize=4)
            if label in race.paused:
                ax.plot(rungs[-1:], scores[-1:], color=style.hex, marker="x", markersize=9, linestyle="none")
        ax.set(xlabel="share of the run", ylabel=race.metric, xlim=(0, 1))
        percentages(ax, "x")

    return Panel(title=f"{race.name}: {len(race.paused)} of {len(race.measured)} variants paused", draw=draw)
