"""Scores as a card has them: the figures of an evaluation's scores.json, with intervals where it has some."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from snaketune.publishing.told import Told

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
INTERVAL = "_interval"


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
    for section, known in FIGURES.items():
        for on, measured in scores.get(section, {}).items():
            for path, (words, size) in known.items():
                yield from _figure(name, section, on, measured, path, words, _at(measured, size))
    for task, measured in scores.get("tasks", {}).items():
        for metric in measured:
            if not metric.endswith(INTERVAL):
                yield from _figure(name, "tasks", task, measured, metric, metric, None)


def _figure(
    name: str, section: str, on: str, measured: dict[str, Any], path: str, words: str, size: Any
) -> Iterator[Figure]:
    # Names of tasks' metrics may hold dots.
    value = measured.get(path, _at(measured, path))
    if not _is_number(value):
        return
    interval = measured.get(f"{path}{INTERVAL}", _at(measured, f"{path}{INTERVAL}"))
    bounds = isinstance(interval, list) and len(interval) == 2 and all(map(_is_number, interval))
    yield Figure(
        evaluation=name.partition("/")[0],
        section=section,
        on=on,
        path=path,
        name=words,
        value=value,
        interval=(interval[0], interval[1]) if bounds else None,
        size=size if isinstance(size, int) else None,
    )


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
