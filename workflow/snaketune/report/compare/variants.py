"""All DPO runs in one table: what differs between them, what they scored, what they cost, and which is the first.

`sort_by` names a figure by its path in scores.json. Of losses, perplexities, error rates and lengths the lowest comes first, of
all else the highest; runs that don't have it come last, and equal ones in the order of their names.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from snaketune.config.score_names import REWARDS
from snaketune.config.suggestions import unknown
from snaketune.errors import SnaketuneError
from snaketune.report.compare.differing_keys import called, differing
from snaketune.report.compare.scores import Measure, measures
from snaketune.report.data.results import Findings, Result, natural
from snaketune.report.text import clean, words
from snaketune.stages.table import STAGES

# Words in the name of a figure of which the lowest comes first.
LESS_IS_BETTER = {"bits", "brier", "cer", "error", "kl", "loss", "nll", "perplexity", "ter", "tokens", "wer"}
# Of what an evaluation measures, the table leaves out what says the same again; evaluation.csv has all of it.
LEFT_OUT = ("perplexity", "log-probability margin", "chosen is likelier")


@dataclass(frozen=True, kw_only=True)
class Stopped:
    """Where and why a run was ended early."""

    step: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Caution:
    """A known way to fail that a run was seen to go, as it was first seen, and what was left of it at the end."""

    kind: str
    step: int
    text: str
    at_end: str | None


@dataclass(frozen=True, kw_only=True)
class Variants:
    """The DPO runs in the order of the table.

    Attributes:
        labels: the first one first; without `sort_by`, by name.
        names: by label, the run by what differs.
        keys: what differs: by name of the key and label, the value as text.
        columns: what was measured.
        sort_by, sorted_by, highest_first: what they are sorted by as it was asked for, its column, and which way; no column
            where no run was measured against a reference and that is what was asked for.
        best: label of the run that `results/best` links to.
        tied: labels of others with the same value.
        stopped: by label, the runs that were ended early.
        warnings: by label, what the runs were warned of.
    """

    labels: list[str]
    names: dict[str, str]
    keys: dict[str, dict[str, str]]
    columns: list[Measure]
    sort_by: str | None
    sorted_by: Measure | None
    highest_first: bool
    best: str | None
    tied: list[str]
    stopped: dict[str, Stopped]
    warnings: dict[str, list[Caution]]


def variants(findings: Findings, sort_by: str | None) -> Variants:
    """Args: sort_by: a dotted path into scores.json.

    Raises:
        SnaketuneError: no run has a number there; with the names that there are.
    """
    runs = findings.of("dpo")
    labels = [run.label for run in runs]
    columns = [*_measured(findings, labels, sort_by), *_trained(runs)]
    stopped = {run.label: found for run in runs if (found := stopped_early(run))}
    sorted_by, best, tied, highest_first = None, None, [], bool(sort_by and more_is_better(sort_by))
    if sort_by and runs:
        sorted_by = _sorting(findings, labels, columns, sort_by)
    if sorted_by:
        values = sorted_by.values
        way = -1 if highest_first else 1
        labels.sort(key=lambda run: (values[run] is None, way * (values[run] or 0.0), natural(run)))
        known = [run for run in labels if values[run] is not None]
        # What was given up on isn't handed on, unless all was.
        best = next((run for run in known if run not in stopped), known[0])
        tied = [run for run in known if run != best and values[run] == values[best]]
        others = [column for column in columns if column is not sorted_by]
        columns = [sorted_by, *sorted(others, key=lambda column: column.on != sorted_by.on)]
    keys = differing(findings, runs)
    return Variants(
        labels=labels,
        names={label: called(label, keys) for label in labels},
        keys=keys,
        columns=columns,
        sort_by=sort_by,
        sorted_by=sorted_by,
        highest_first=highest_first,
        best=best,
        tied=tied,
        stopped=stopped,
        warnings={run.label: found for run in runs if (found := warnings_of(run))},
    )


def stopped_early(run: Result) -> Stopped | None:
    """Where `stop_if` ended a run."""
    found = run.manifest.get("stopped") or run.run.get("stopped")
    return Stopped(step=int(found["step"]), reason=clean(found["reason"])) if found else None


def warnings_of(run: Result) -> list[Caution]:
    """What the training said of itself."""
    return [
        Caution(
            kind=words(found["kind"]),
            step=int(found["step"]),
            text=clean(found["text"]),
            at_end=clean(found["at_end"]["text"]) if found.get("at_end") else None,
        )
        for found in run.run.get("warnings") or []
    ]


def best_of(found: Variants) -> dict[str, Any]:
    """For the manifest: the run that comes first, by what, and where its model lies. Nothing without `sort_by`."""
    if found.best is None:
        return {}
    stage, _, name = found.best.partition(":")
    value = found.sorted_by.values[found.best]
    facts = {"run": found.best, "sort_by": found.sorted_by.path, "value": value}
    return {"best": facts | {"payload": f"{stage}/{name}/{STAGES[stage].payload}"}}


def csv_rows(found: Variants) -> tuple[list[str], list[dict[str, Any]]]:
    """Columns and rows: a run per row, unrounded, in the order of the table."""
    named = {_heading(column): column for column in found.columns}
    rows = []
    for label in found.labels:
        stopped = found.stopped.get(label)
        rows.append(
            {"variant": label, "best": "yes" if label == found.best else ""}
            | {key: values[label] for key, values in found.keys.items()}
            | {heading: column.values[label] for heading, column in named.items()}
            | {"warnings": ", ".join(one.kind for one in found.warnings.get(label, []))}
            | {"stopped at step": stopped and stopped.step, "because": stopped and stopped.reason}
        )
    return ["variant", "best", *found.keys, *named, "warnings", "stopped at step", "because"], rows


def inside(scores: Any, path: str) -> Any:
    """What stands at a dotted path; names may hold dots themselves. None if there is nothing.

    >>> inside({"tasks": {"v1.5": {"acc": 0.5}}}, "tasks.v1.5.acc")
    0.5
    """
    if not path:
        return scores
    parts = path.split(".")
    for end in range(len(parts), 0, -1):
        name = ".".join(parts[:end])
        if isinstance(scores, dict) and name in scores:
            found = inside(scores[name], ".".join(parts[end:]))
            if found is not None:
                return found
    return None


def _sorting(findings: Findings, labels: list[str], columns: list[Measure], path: str) -> Measure | None:
    """The column with the figure at `path`, of the first evaluation that has one of a run. None, with a warning, where it is a
    reward, and no run has any: that may show only here, and all else is worth a report."""
    values = {label: _figure(findings, label, path) for label in labels}
    if all(value is None for value in values.values()):
        if path.startswith("preferences.") and path.rpartition(".")[2] in REWARDS:
            print(
                f"warning: {_nothing_there(findings, path)}; the runs aren't sorted, and none is the best", flush=True
            )
            return None
        raise SnaketuneError(_nothing_there(findings, path))
    for column in columns:
        if column.path == path and column.values == values:
            return column
    *_, on, name = path.split(".")
    better = 1 if more_is_better(path) else -1
    return Measure(path=path, on=clean(on), name=words(name), unit="", better=better, values=values, sizes={})


def _figure(findings: Findings, label: str, path: str) -> float | None:
    for models in findings.evaluations.values():
        for scored in models:
            value = inside(scored.scores, path) if scored.model == label else None
            if _is_figure(value):
                return value
    return None


def _is_figure(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _nothing_there(findings: Findings, path: str) -> str:
    dpo = [scored for models in findings.evaluations.values() for scored in models if scored.model.startswith("dpo:")]
    there = sorted({name for scored in dpo for name in _paths(scored.scores)})
    return f"report.sort_by: no evaluated run of `dpo:` has a number at {path!r}{unknown(path, there)}"


def _paths(scores: dict[str, Any], before: str = "") -> Iterator[str]:
    """All paths that lead to a number, as `sort_by` names them."""
    for name, value in scores.items():
        if isinstance(value, dict):
            yield from _paths(value, f"{before}{name}.")
        elif _is_figure(value):
            yield f"{before}{name}"


def _measured(findings: Findings, labels: list[str], sort_by: str | None) -> Iterator[Measure]:
    for evaluation, models in findings.evaluations.items():
        where = f" ({evaluation})" if len(findings.evaluations) > 1 else ""
        for measure in measures([scored for scored in models if scored.model in labels], where):
            if measure.path == sort_by or not (measure.detail or measure.name in LEFT_OUT):
                yield measure.of(labels)


def _trained(runs: list[Result]) -> Iterator[Measure]:
    """How far a run went from its reference, and what it cost."""
    for name, unit, better, values in (
        ("KL", "nats", 0, {run.label: _last(run, "kl") for run in runs}),
        ("time", "seconds", -1, {run.label: run.run.get("seconds") for run in runs}),
        ("tokens/s", "rate", 1, {run.label: run.run.get("tokens_per_second_median") for run in runs}),
    ):
        if any(value is not None for value in values.values()):
            yield Measure(path="", on="training", name=name, unit=unit, better=better, values=values, sizes={})


def _last(run: Result, key: str) -> float | None:
    return next((entry[key] for entry in reversed(run.history) if _is_figure(entry.get(key))), None)


def _heading(column: Measure) -> str:
    return f"{column.on}: {column.name}"


def more_is_better(path: str) -> bool:
    """By the words of the last name in `path`: of losses, perplexities, error rates and lengths, less is better.

    >>> more_is_better("preferences.pairs.reward_accuracy"), more_is_better("conversations.chat.held_out_loss")
    (True, False)
    >>> more_is_better("tasks.wiki.word_perplexity"), more_is_better("tasks.choice.acc_norm")
    (False, True)
    """
    last = path.rpartition(".")[2].replace(",", "_").replace("-", "_")
    return LESS_IS_BETTER.isdisjoint(last.lower().split("_"))
