"""The measures of model cards, of the report's score tables and of evaluation.csv, from the scores of models."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from snaketune.evaluation.score_intervals import SHARES
from snaketune.publishing.results import is_number
from snaketune.publishing.scored_models import ScoredModel
from snaketune.text import clean, decimal, duration, percent, short, whole

# Name, unit and direction of each score of preferences.
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
    # Of reward models, besides their reward accuracy.
    "reward_margin": ("reward margin", "", 0),
    "chosen_reward": ("chosen reward", "", 0),
    "rejected_reward": ("rejected reward", "", 0),
    "calibration_error": ("calibration error", "share", -1),
}
# Measures that are also shown for the pairs of each source.
BY_SOURCE = ("logp_accuracy_per_token", "reward_accuracy", "reward_margin_nats", "reward_margin")
FORMATS: dict[str, Callable[[float | None], str]] = {
    "share": percent, "nats": decimal, "": decimal, "tokens": decimal, "count": whole, "seconds": duration, "rate": short
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Measure:
    """One row of the score table.

    Attributes:
        path: Its path in scores.json.
        key: Its path below the corpus or task.
        on: The corpus or task that it was measured on.
        better: 1 if higher is better, -1 if lower is better, 0 if neither.
        values: By model; None where it wasn't measured.
        intervals: By model, the 95% intervals that the evaluation wrote.
        detail: Whether it is a breakdown by task or source.
    """

    path: str
    key: str = ""
    on: str
    name: str
    unit: str
    better: int
    values: dict[str, float | None]
    intervals: dict[str, list[float]] = field(default_factory=dict)
    detail: bool = False

    @property
    def label(self) -> str:
        """The name with its unit."""
        return f"{self.name}, {self.unit}" if self.unit in ("nats", "tokens") else self.name

    def shown(self, model: str) -> str:
        return FORMATS[self.unit](self.values.get(model))

    def interval(self, model: str) -> tuple[float, float] | None:
        """The 95% interval; None without a value or an interval."""
        known = self.values.get(model) is not None and model in self.intervals
        return tuple(self.intervals[model]) if known else None

    def shown_interval(self, model: str) -> str:
        """The interval as `[55.1%, 67.3%]`; empty if there is none."""
        bounds = self.intervals.get(model)
        return f"[{', '.join(FORMATS[self.unit](bound) for bound in bounds)}]" if bounds else ""

    def of(self, models: list[str]) -> "Measure":
        """The same measure for exactly these models; None where one wasn't measured."""
        return replace(self, values={model: self.values.get(model) for model in models})

    def is_best(self, model: str) -> bool:
        """Whether the model has the best value and not all values are equal."""
        known = [value for value in self.values.values() if value is not None]
        if not self.better or len(set(known)) < 2:
            return False
        return self.values.get(model) == (max(known) if self.better > 0 else min(known))


def measures(models: list[ScoredModel], where: str = "") -> list[Measure]:
    """All measures of one evaluation. `where` is a suffix for the names of corpora and tasks."""
    found = []
    sections = {"conversations": _of_prompts, "teachers": _of_teacher, "preferences": _of_pairs, "tasks": _of_tasks}
    for section, kinds in sections.items():
        entries = {scored.model: scored.scores.get(section) or {} for scored in models}
        by_task = {scored.model: scored.scores.get("task_intervals") or {} for scored in models}
        for on in dict.fromkeys(key for by_name in entries.values() for key in by_name):
            here = {model: by_name.get(on) or {} for model, by_name in entries.items()}
            for path, name, unit, better in kinds(list(here.values())):
                *parents, key = path
                measured = {model: at_keys(entry, parents) for model, entry in here.items()}
                written = {model: entry.get(f"{key}_interval") for model, entry in measured.items()}
                if section == "tasks":
                    written = {model: at_keys(by_task[model], [on]).get(key) or written[model] for model in written}
                values = {model: entry.get(key) for model, entry in measured.items()}
                values = {model: value if is_number(value) else None for model, value in values.items()}
                if any(value is not None for value in values.values()):
                    measure = Measure(
                        path=".".join((section, on, *path)),
                        key=".".join(path),
                        on=f"{clean(on)}{where}",
                        name=name,
                        unit=unit,
                        better=better,
                        values=values,
                        intervals={model: bounds for model, bounds in written.items() if _is_interval(bounds)},
                        detail="by_task" in parents or "by_source" in parents,
                    )
                    found.append(measure)
    return found


def _is_interval(bounds: Any) -> bool:
    return isinstance(bounds, list) and len(bounds) == 2 and all(map(is_number, bounds))


# Path below the corpus or task, name, unit and direction.
Kind = tuple[tuple[str, ...], str, str, int]


def _of_prompts(entries: list[dict[str, Any]]) -> Iterator[Kind]:
    yield ("held_out_loss",), "held-out loss", "nats", -1
    yield ("perplexity",), "perplexity", "", -1
    yield ("exact_match", "share"), "exact match", "share", 1
    for task in sorted({task for entry in entries for task in at_keys(entry, ["exact_match", "by_task"])}):
        yield ("exact_match", "by_task", task, "share"), f"exact match: {clean(task)}", "share", 1
    yield ("exact_match", "mean_response_tokens"), "mean response length", "tokens", 0
    yield ("kl", "per_token"), "KL divergence of responses, per token", "nats", 0


def _of_teacher(entries: list[dict[str, Any]]) -> Iterator[Kind]:
    yield ("agreement",), "same most likely token", "share", 1
    yield ("kl",), "KL divergence from it, per token", "nats", -1


def _of_pairs(entries: list[dict[str, Any]]) -> Iterator[Kind]:
    for key, about in PREFERENCES.items():
        yield (key,), *about
    for source in sorted({source for entry in entries for source in at_keys(entry, ["by_source"])}, key=int):
        for key in BY_SOURCE:
            name, unit, better = PREFERENCES[key]
            yield ("by_source", source, key), f"{name}: source {source}", unit, better


def _of_tasks(entries: list[dict[str, Any]]) -> Iterator[Kind]:
    for metric in sorted({metric for entry in entries for metric in entry}):
        yield (metric,), clean(metric), *(("share", 1) if metric.startswith(SHARES) else ("", 0))


def at_keys(entry: Any, keys: list[str]) -> dict[str, Any]:
    """The mapping below some keys; empty if there is none."""
    for key in keys:
        entry = (entry or {}).get(key)
    return entry or {}
