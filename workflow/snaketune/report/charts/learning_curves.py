"""Scores over the share of a run: of its snapshots, and of the variants of a race at each rung."""

from matplotlib.axes import Axes

from snaketune.report.charts.style import Chart, Panel, Style, percentages
from snaketune.report.compare.measures import FORMATS, Measure
from snaketune.report.data.races import Race
from snaketune.report.text import percent


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
            own = [(paused.get(one, snapshot_of(one)[1]), one) for one in models if snapshot_of(one)[0] == run]
            runs[run] = sorted(known + own)
    # Perplexity is another scale of the loss.
    shown = [one for one in table if one.better and not one.detail and one.name != "perplexity"] if runs else []
    return [_curve(measure, runs, styles, where) for measure in shown]


def _curve(measure: Measure, runs: dict[str, list[tuple[float, str]]], styles: dict[str, Style], where: str) -> Panel:
    def draw(ax: Axes) -> None:
        for run, points in runs.items():
            style = styles.get(run) or styles[points[-1][1]]
            known = [
                (x, y, measure.intervals.get(model))
                for x, model in points
                if (y := measure.values.get(model)) is not None
            ]
            for x, interval in ((x, interval) for x, _, interval in known if interval):
                ax.plot([x, x], interval, color=style.hex, alpha=0.5)
            ax.plot([x for x, *_ in known], [y for _, y, _ in known], color=style.hex, marker="o", markersize=4)
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
