"""Scores of a model card, read from the scores.json of its evaluations, with intervals where available."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from snaketune.publishing.card_results import CardResults

# By section of scores.json: path of a score → its name, and the path of its size (tokens, prompts or pairs).
SCORES = {
    "conversations": {
        "held_out_loss": ("held-out loss, nats per token", "supervised_tokens"),
        "perplexity": ("perplexity", "supervised_tokens"),
        "exact_match.share": ("exact match, share", "exact_match.prompts"),
    },
    "preferences": {
        "logp_accuracy": ("log-prob accuracy, share", "pairs"),
        "logp_accuracy_per_token": ("log-prob accuracy per token, share", "pairs"),
        "reward_accuracy": ("reward accuracy, share", "pairs_with_reference"),
        "reward_margin_nats": ("reward margin without beta, nats", "pairs_with_reference"),
    },
}


@dataclass(frozen=True, kw_only=True)
class Score:
    """One score.

    Attributes:
        section: Its section of scores.json.
        on: The corpus or task that it was measured on.
        path: Its path in that section, which is the metric type on the Hub.
        interval: Lower and upper bound, if known.
        size: Number of prompts, pairs or tokens, if known.
    """

    evaluation: str
    section: str
    on: str
    path: str
    name: str
    value: float
    interval: tuple[float, float] | None
    size: int | None


def scores_of(results: CardResults) -> list[Score]:
    """The scores of all evaluations of the model, in order."""
    return [
        score
        for evaluation in results.of("eval")
        for score in _scores_of(evaluation.job.name, results.read_scores(evaluation))
    ]


def _scores_of(name: str, scores: dict[str, Any]) -> Iterator[Score]:
    evaluation = name.partition("/")[0]
    for section, known in SCORES.items():
        for on, measured in scores.get(section, {}).items():
            for path, (words, size) in known.items():
                if _is_number(value := _at_path(measured, path)):
                    yield Score(
                        evaluation=evaluation,
                        section=section,
                        on=on,
                        path=path,
                        name=words,
                        value=value,
                        interval=_bounds(_at_path(measured, f"{path}_interval")),
                        size=_at_path(measured, size),
                    )
    # Metric names of tasks are those of lm-evaluation-harness, and may contain dots.
    for task, measured in scores.get("tasks", {}).items():
        intervals = scores.get("task_intervals", {}).get(task, {})
        for metric, value in measured.items():
            if _is_number(value):
                yield Score(
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


def _at_path(measured: Any, path: str) -> Any:
    """The value at a dotted path, or None.

    >>> _at_path({"exact_match": {"share": 0.5}}, "exact_match.share")
    0.5
    """
    for key in path.split("."):
        measured = measured.get(key) if isinstance(measured, dict) else None
    return measured


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
