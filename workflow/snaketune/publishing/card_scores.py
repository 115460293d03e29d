"""Scores as a card has them: the figures of an evaluation's scores.json, with intervals where it has some."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from snaketune.publishing.card_results import Told

# By section of scores.json, paths to figures, their names, and how many prompts or pairs they are of.
FIGURES = {
    "conversations": {
        "held_out_loss": ("held-out loss, nats per token", "supervised_tokens"),
        "perplexity": ("perplexity", "supervised_tokens"),
        "exact_match.share": ("exact match, share", "exact_match.prompts"),
    },
    "preferences": {
        "logp_accuracy": ("chosen is likelier, share", "pairs"),
        "logp_accuracy_per_token": ("chosen is likelier per token, share", "pairs"),
        "reward_accuracy": ("chosen gained more than rejected, share", "pairs_with_reference"),
        "reward_margin_nats": ("gain margin, nats", "pairs_with_reference"),
    },
}


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One number.

    Attributes:
        section: of scores.json.
        on: the corpus or task that it was measured on.
        path: where it stands there, which is what the Hub calls the metric.
        interval: its lower and upper bound, if they are known.
        size: how many prompts, pairs or tokens it is of, if that is known.
    """

    evaluation: str
    section: str
    on: str
    path: str
    name: str
    value: float
    interval: tuple[float, float] | None
    size: int | None


def figures(told: Told) -> list[Figure]:
    """Of all evaluations of the model, in order."""
    return [
        figure for evaluation in told.of("eval") for figure in _figures(evaluation.job.name, told.scores(evaluation))
    ]


def _figures(name: str, scores: dict[str, Any]) -> Iterator[Figure]:
    evaluation = name.partition("/")[0]
    for section, known in FIGURES.items():
        for on, measured in scores.get(section, {}).items():
            for path, (words, size) in known.items():
                if _is_number(value := _at(measured, path)):
                    yield Figure(
                        evaluation=evaluation,
                        section=section,
                        on=on,
                        path=path,
                        name=words,
                        value=value,
                        interval=_bounds(_at(measured, f"{path}_interval")),
                        size=_at(measured, size),
                    )
    # Names of tasks' metrics are lm-evaluation-harness's, and may hold dots.
    for task, measured in scores.get("tasks", {}).items():
        intervals = scores.get("task_intervals", {}).get(task, {})
        for metric, value in measured.items():
            if _is_number(value):
                yield Figure(
                    evaluation=evaluation,
                    section="tasks",
                    on=task,
                    path=metric,
                    name=metric,
                    value=value,
                    interval=_bounds(intervals.get(metric)),
                    size=None,
                )


def _bounds(interval: Any) -> tuple[float, float] | None:
    known = isinstance(interval, list) and len(interval) == 2 and all(map(_is_number, interval))
    return (interval[0], interval[1]) if known else None


def _at(measured: Any, path: str) -> Any:
    """
    >>> _at({"exact_match": {"share": 0.5}}, "exact_match.share")
    0.5
    """
    for key in path.split("."):
        measured = measured.get(key) if isinstance(measured, dict) else None
    return measured


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
