"""Charts of the changes that DPO made in held-out pairs: margins before and after, and rewards of chosen and rejected."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from snaketune.report.charts.style import COLOURS, Chart, Panel, Style, message
from snaketune.report.data.preference_shift import PreferenceChange
from snaketune.report.judge.difference_intervals import wins
from snaketune.report.text import decimal, percent

BINS = 40
REFERENCE = Style(colour="base-1")
CHOSEN, REJECTED = Style(colour="data"), Style(colour="bad", dash="--")
MUTED = COLOURS["muted"][0]
# The outermost bins hold everything beyond these quantiles, so that an outlier doesn't compress the rest.
TAIL = 0.005


def preferences_chart(changes: list[PreferenceChange], styles: dict[str, Style]) -> Chart:
    """Two panels for each change: margins, then rewards."""
    several = len({(change.evaluation, change.corpus) for change in changes}) > 1
    names = [f"{one.label}, {one.corpus} ({one.evaluation})" if several else one.label for one in changes]
    panels = [
        panel for name, one in zip(names, changes) for panel in (_margins(name, one, styles), _rewards(name, one))
    ]
    key = {label: styles.get(label, REFERENCE) for change in changes for label in (change.before, change.label)}
    return Chart(
        name="preferences",
        panels=panels or [message("No evaluation scored a DPO run and its reference on the same pairs.")],
        key=key | {"chosen": CHOSEN, "rejected": REJECTED} if panels else {},
    )


def _margins(name: str, change: PreferenceChange, styles: dict[str, Style]) -> Panel:
    """Histogram of the log-prob margin per token (chosen less rejected), before and after."""
    before_P, after_P = change.margins(per_token=True)

    def draw(ax: Axes) -> None:
        ax.axvline(0.0, color=MUTED, linewidth=0.8, linestyle=":")
        edges = _edges(before_P, after_P)
        _steps(ax, before_P, edges, styles.get(change.before, REFERENCE))
        _steps(ax, after_P, edges, styles[change.label])
        _axes(ax, "log-prob margin (chosen less rejected), nats per token")

    shares = (percent(wins(margins).mean()) for margins in (before_P, after_P))
    return Panel(title=f"{name}: chosen preferred per token in {' → '.join(shares)}", draw=draw)


def _rewards(name: str, change: PreferenceChange) -> Panel:
    """Histogram of the rewards of chosen and rejected; also those before, unless they are all zero."""
    before_P2, after_P2 = change.rewards()
    # Log-probabilities of one model, computed twice, differ by rounding errors.
    moved_before = bool(np.abs(before_P2).max() > 0.05 * np.abs(after_P2).max())

    def draw(ax: Axes) -> None:
        ax.axvline(0.0, color=MUTED, linewidth=0.8, linestyle=":")
        edges = _edges(after_P2, before_P2 if moved_before else after_P2)
        for column, style in enumerate((CHOSEN, REJECTED)):
            if moved_before:
                _steps(ax, before_P2[:, column], edges, style, filled=False)
            _steps(ax, after_P2[:, column], edges, style)
        _axes(ax, "reward, nats × beta" if change.beta else "log-prob gain, nats")

    chosen, rejected = (decimal(mean) for mean in after_P2.mean(axis=0).tolist())
    what = "mean rewards" if change.beta else "mean log-prob gains"
    before = "outlines: before" if moved_before else "before: all 0"
    return Panel(title=f"{name}: {what}, chosen {chosen}, rejected {rejected} ({before})", draw=draw)


def _edges(*values: np.ndarray) -> np.ndarray:
    """Common bin edges of all `values`, float64[BINS + 1]."""
    low = min(float(np.quantile(one, TAIL)) for one in values)
    high = max(float(np.quantile(one, 1 - TAIL)) for one in values)
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
