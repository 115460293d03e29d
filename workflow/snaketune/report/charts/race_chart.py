"""The chart of races."""

from matplotlib.axes import Axes

from snaketune.report.charts.style import Chart, Panel, Style, percentages
from snaketune.report.data.races import Race


def race_chart(races: list[Race], styles: dict[str, Style]) -> Chart:
    """A panel per race: the score of each variant at each rung, and a cross where it was paused."""
    return Chart(
        name="race",
        panels=[_panel(race, styles) for race in races],
        key={label: styles[label] for race in races for label, by_rung in race.measured.items() if by_rung},
    )


def _panel(race: Race, styles: dict[str, Style]) -> Panel:
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
