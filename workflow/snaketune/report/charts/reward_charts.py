"""Charts of reward models: the curves that they logged, and of held-out pairs how far a margin can be trusted."""

from typing import Any

from matplotlib.axes import Axes

from snaketune.report.charts.style import MUTED, Chart, Panel, Style, curve_with_intervals, line_at, percentages
from snaketune.report.charts.training_charts import curve, throughput, training_chart, whole_runs
from snaketune.report.data.results import ResultSet
from snaketune.text import decimal, percent

Styles = dict[str, Style]
Scores = dict[str, Any]
# Key of the log, title, axis label, number format and the value before anything is learned.
CURVES = (
    ("loss", "Training loss", "loss", decimal, None),
    ("accuracy", "Accuracy", "share of pairs", percent, 0.5),
    ("margin", "Margin", "reward of chosen less rejected", decimal, 0.0),
    ("chosen_reward", "Rewards", "reward", decimal, 0.0),
)


def reward_chart(results: ResultSet, styles: Styles) -> Chart:
    """Loss, accuracy, margin, rewards and throughput of all runs."""
    runs = whole_runs(results, "reward")
    panels = [curve(key, title, axis, runs, styles, *shown) for key, title, axis, *shown in CURVES]
    return training_chart("reward", runs, styles, [*panels, throughput(runs, styles)])


def reward_evaluation_chart(results: ResultSet, styles: Styles) -> Chart:
    """A panel with the calibration and one with the accuracy by margin for each evaluation and corpus."""
    by_rows: dict[tuple[str, str], dict[str, Scores]] = {}
    for scored in results.reward_models:
        for corpus, scores in scored.scores["preferences"].items():
            by_rows.setdefault((scored.evaluation, corpus), {})[scored.model] = scores
    several = len({evaluation for evaluation, _ in by_rows}) > 1
    panels = []
    for (evaluation, corpus), of_models in by_rows.items():
        where = f"{corpus} ({evaluation})" if several else corpus
        panels += [_calibration(where, of_models, styles), _by_margin(where, of_models, styles)]
    return Chart(
        name="rewards",
        panels=panels,
        key={model: styles[model] for of_models in by_rows.values() for model in of_models},
    )


def _calibration(where: str, of_models: dict[str, Scores], styles: Styles) -> Panel:
    """Accuracy over the predicted probability, with 95% intervals; on the dotted line, both are equal."""

    def draw(ax: Axes) -> None:
        ax.plot((0.5, 1), (0.5, 1), color=MUTED, linewidth=0.8, linestyle=":")
        for model, scores in of_models.items():
            points = ((bin["predicted"], bin["accuracy"], bin["accuracy_interval"]) for bin in scores["calibration"])
            curve_with_intervals(ax, points, styles[model])
        ax.set(xlabel="predicted probability of the preferred response", ylabel="share that is right")
        percentages(ax, "x")
        percentages(ax, "y")
        ax.set_ylim(-0.03, 1.03)

    errors = ", ".join(percent(scores["calibration_error"]) for scores in of_models.values())
    return Panel(title=f"{where}: calibration, mean error {errors}", draw=draw)


def _by_margin(where: str, of_models: dict[str, Scores], styles: Styles) -> Panel:
    """Accuracy of equally large groups of pairs, from the smallest to the largest margin."""

    def draw(ax: Axes) -> None:
        line_at(ax, 0.5)
        for model, scores in of_models.items():
            points = (
                ((group["from"] + group["to"]) / 2, group["accuracy"], group["accuracy_interval"])
                for group in scores["by_margin"]
            )
            curve_with_intervals(ax, points, styles[model])
        ax.set(xlabel="size of the margin", ylabel="share that is right")
        percentages(ax, "y")
        ax.set_ylim(-0.03, 1.03)

    largest = ", ".join(percent(scores["by_margin"][-1]["accuracy"]) for scores in of_models.values())
    return Panel(title=f"{where}: accuracy by margin, {largest} in the group of the largest", draw=draw)
