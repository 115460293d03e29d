"""Scores of all models: the measures of the tables, evaluation.csv, evaluation.json and the chart."""

from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

from snaketune.evaluation.score_intervals import SHARES, wilson
from snaketune.report.charts.style import COLOURS, Chart, Panel, Style, message
from snaketune.report.data.results import ResultSet, ScoredModel, unique
from snaketune.report.text import clean, decimal, duration, percent, short, whole

PREFERENCES = {
    "logp_accuracy": ("log-prob accuracy", "share", 1),
    "logp_accuracy_per_token": ("log-prob accuracy, per token", "share", 1),
    "reward_accuracy": ("reward accuracy", "share", 1),
    "logp_margin_nats": ("log-prob margin", "nats", 0),
    "reward_margin_nats": ("reward margin, without beta", "nats", 0),
    "chosen_logp_nats": ("chosen log-prob", "nats", 0),
    "rejected_logp_nats": ("rejected log-prob", "nats", 0),
    "chosen_reward_nats": ("chosen reward, without beta", "nats", 0),
    "rejected_reward_nats": ("rejected reward, without beta", "nats", 0),
}
# Measures that are also shown for the pairs of each source.
BY_SOURCE = ("logp_accuracy_per_token", "reward_accuracy", "reward_margin_nats")
FORMATS = {
    "share": percent, "nats": decimal, "": decimal, "tokens": decimal, "count": whole, "seconds": duration, "rate": short
}  # fmt: skip
DOT_STEP, ROW_STEP = 0.085, 0.24


@dataclass(frozen=True, kw_only=True)
class Measure:
    """One row of the score table.

    Attributes:
        path: Its path in scores.json.
        on: The corpus or task that it was measured on.
        better: 1 if higher is better, -1 if lower is better, 0 if neither.
        values: By model; None where it wasn't measured.
        sizes: By model, the number of prompts or pairs of a share.
        intervals: By model, the 95% intervals that the evaluation wrote.
        detail: Whether it is a breakdown by task or source.
    """

    path: str
    on: str
    name: str
    unit: str
    better: int
    values: dict[str, float | None]
    sizes: dict[str, int]
    intervals: dict[str, list[float]] = field(default_factory=dict)
    detail: bool = False

    def shown(self, model: str) -> str:
        return FORMATS[self.unit](self.values.get(model))

    def interval(self, model: str) -> tuple[float, float] | None:
        """The 95% interval, or None. Wilson's for shares in older scores, which have no intervals."""
        value, size = self.values.get(model), self.sizes.get(model)
        if value is None:
            return None
        if model in self.intervals:
            low, high = self.intervals[model]
            return low, high
        return wilson(value, size) if size and self.unit == "share" else None

    def shown_interval(self, model: str) -> str:
        """The interval as `[55.1%, 67.3%]`; empty if there is none."""
        bounds = self.interval(model)
        return f"[{', '.join(FORMATS[self.unit](bound) for bound in bounds)}]" if bounds else ""

    def of(self, models: list[str]) -> "Measure":
        """The same measure for exactly these models; None where one wasn't measured."""
        return replace(self, values={model: self.values.get(model) for model in models})

    def is_best(self, model: str) -> bool:
        """Return True if the model has the best value and not all values are equal."""
        known = [value for value in self.values.values() if value is not None]
        if not self.better or len(set(known)) < 2 or self.values.get(model) is None:
            return False
        return self.values[model] == (max(known) if self.better > 0 else min(known))


def measures(models: list[ScoredModel], where: str = "") -> list[Measure]:
    """All measures of one evaluation. `where` is a suffix for the names of corpora and tasks."""
    rows: list[Measure] = []

    def add(
        section: str, on: str, path: tuple[str, ...], name: str, unit: str, better: int, size: str = "", **more: Any
    ):
        values, sizes, intervals = {}, {}, {}
        for scored in models:
            *parents, key = path
            entry = _at_path(scored.scores.get(section, {}).get(on), parents)
            values[scored.model] = entry.get(key)
            sizes[scored.model] = entry.get(size) or 0
            task_interval = (
                _at_path(scored.scores.get("task_intervals", {}).get(on), []).get(key) if section == "tasks" else None
            )
            if bounds := task_interval or entry.get(f"{key}_interval"):
                intervals[scored.model] = bounds
        if any(value is not None for value in values.values()):
            about = {"path": ".".join((section, on, *path)), "on": f"{clean(on)}{where}"}
            about |= {"values": values, "sizes": sizes, "intervals": intervals}
            rows.append(Measure(**about, name=name, unit=unit, better=better, **more))

    for on in _keys(models, "conversations"):
        add("conversations", on, ("held_out_loss",), "held-out loss", "nats", -1)
        add("conversations", on, ("perplexity",), "perplexity", "", -1)
        add("conversations", on, ("exact_match", "share"), "exact match", "share", 1, "prompts")
        entries = (
            _at_path(scored.scores.get("conversations", {}).get(on), ["exact_match", "by_task"]) for scored in models
        )
        for task in sorted(unique(task for entry in entries for task in entry)):
            path = ("exact_match", "by_task", task, "share")
            add("conversations", on, path, f"exact match: {clean(task)}", "share", 1, "prompts", detail=True)
        add("conversations", on, ("exact_match", "mean_response_tokens"), "mean response length", "tokens", 0)
    for on in _keys(models, "preferences"):
        for key, (name, unit, better) in PREFERENCES.items():
            size = "pairs_with_reference" if key.startswith("reward") else "pairs"
            add("preferences", on, (key,), name, unit, better, size)
        entries = (scored.scores.get("preferences", {}).get(on) for scored in models)
        sources = unique(source for entry in entries for source in _at_path(entry, ["by_source"]))
        for source, key in product(sorted(sources, key=int), BY_SOURCE):
            name, unit, better = PREFERENCES[key]
            size = "pairs_with_reference" if key.startswith("reward") else "pairs"
            path = ("by_source", source, key)
            add("preferences", on, path, f"{name}: source {source}", unit, better, size, detail=True)
    for on in _keys(models, "tasks"):
        for metric in sorted(unique(key for scored in models for key in scored.scores.get("tasks", {}).get(on, {}))):
            unit, better = ("share", 1) if metric.startswith(SHARES) else ("", 0)
            add("tasks", on, (metric,), clean(metric), unit, better)
    return rows


def _keys(models: list[ScoredModel], section: str) -> list[str]:
    return unique(key for scored in models for key in scored.scores.get(section) or {})


def _at_path(entry: Any, path: list[str]) -> dict[str, Any]:
    for key in path:
        entry = (entry or {}).get(key)
    return entry or {}


def csv_rows(results: ResultSet) -> tuple[list[str], list[dict[str, Any]]]:
    """Columns and rows of evaluation.csv: a measure per row, a model per column, unrounded."""
    labels = unique(scored.model for models in results.evaluations.values() for scored in models)
    rows = [
        {"evaluation": evaluation, "on": measure.on, "measure": measure.name, "unit": measure.unit} | measure.values
        for evaluation, models in results.evaluations.items()
        for measure in measures(models)
    ]
    return ["evaluation", "on", "measure", "unit", *labels], rows


def as_json(results: ResultSet) -> dict[str, Any]:
    """All scores as the evaluations wrote them: evaluation → model → scores.json."""
    return {
        evaluation: {scored.model: scored.scores for scored in models}
        for evaluation, models in results.evaluations.items()
    }


def evaluation_chart(results: ResultSet, styles: dict[str, Style]) -> Chart:
    """Exact match by task, and preference accuracies, with a panel each per evaluation and corpus."""
    panels = []
    for evaluation, models in results.evaluations.items():
        where = f" ({evaluation})" if len(results.evaluations) > 1 else ""
        table = measures(models)
        for on in unique(measure.on for measure in table):
            for title, chosen in (
                (
                    "exact match, all and by task",
                    [m for m in table if m.on == on and m.name.startswith("exact match")],
                ),
                ("preference accuracy", [m for m in table if m.on == on and m.name in _ACCURACIES]),
            ):
                if chosen:
                    panels.append(_dots(f"{on}{where}: {title}", chosen, [scored.model for scored in models], styles))
    labels = unique(scored.model for models in results.evaluations.values() for scored in models)
    return Chart(
        name="evaluation",
        panels=panels or [message("Neither exact match nor preferences were measured.")],
        key={label: styles[label] for label in labels},
    )


_ACCURACIES = {name for name, unit, _ in PREFERENCES.values() if unit == "share"}


def _dots(title: str, rows: list[Measure], models: list[str], styles: dict[str, Style]) -> Panel:
    """A row per measure with a dot per model, each on its 95 % interval."""
    spread = DOT_STEP * (len(models) - 1)
    pitch = spread + ROW_STEP

    def draw(ax: Axes) -> None:
        if rows[0].name in _ACCURACIES:
            ax.axvline(0.5, color=COLOURS["muted"][0], linewidth=0.8, linestyle=":")
        for number, measure in enumerate(rows):
            for index, model in enumerate(models):
                value, style = measure.values.get(model), styles[model]
                if value is None:
                    continue
                y = number * pitch - spread / 2 + index * DOT_STEP
                low, high = measure.interval(model) or (value, value)
                ax.plot([low, high], [y, y], color=style.hex, linewidth=1.2, alpha=0.5)
                ax.plot(value, y, color=style.hex, marker=style.marker, markersize=4.5)
        ax.set_ylim((len(rows) - 0.5) * pitch, -0.5 * pitch)
        names = ["all" if m.name == "exact match" else m.name.removeprefix("exact match: ") for m in rows]
        ax.set_yticks([number * pitch for number in range(len(rows))], [_cut(name) for name in names])
        ax.tick_params(axis="y", labelcolor=COLOURS["ink"][0])
        ax.set_xlim(-0.02, 1.02)
        ax.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        for number in range(1, len(rows)):
            ax.axhline((number - 0.5) * pitch, color=COLOURS["line"][0], linewidth=0.6)
        ax.grid(False, axis="y")

    return Panel(title=title, draw=draw, height=max(1.6, 0.6 + pitch * len(rows)))


def _cut(name: str, limit: int = 32) -> str:
    text = " ".join(name.split())
    return text if len(text) <= limit else f"{text[: limit - 1]}…"
