"""The same prompts as answered by every model, chosen by rule and not by looks."""

from dataclasses import dataclass
from typing import Any

from snaketune.report.findings import Scored, unique
from snaketune.report.text import clip

VERDICTS = {True: "right", False: "wrong", None: "unchecked"}


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What one model wrote; `verdict` is right, wrong or unchecked."""

    model: str
    text: str
    tokens: int
    verdict: str
    found: str | None


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One prompt and all answers to it."""

    corpus: str
    task: str | None
    prompt: str
    expected: str | None
    answers: list[Answer]


def choose(models: list[Scored], per_corpus: int | None = None) -> list[Sample]:
    """Samples of one evaluation: of each corpus the first by id, taking turns among its tasks.

    Args:
        per_corpus: how many; by default as many as the evaluation's config says.
    """
    by_model = {scored.model: {(row["corpus"], row["id"]): row for row in scored.responses} for scored in models}
    rows = {key: row for answered in by_model.values() for key, row in answered.items()}
    limit = per_corpus or max((scored.result.spec.get("samples", 0) for scored in models), default=0)
    chosen = []
    for corpus in unique(row["corpus"] for row in rows.values()):
        keys = sorted(key for key in rows if key[0] == corpus)
        for key in _taking_turns(keys, rows)[:limit]:
            answers = [_answer(model, answered.get(key)) for model, answered in by_model.items()]
            chosen.append(_sample(rows[key], [answer for answer in answers if answer]))
    return chosen


def _taking_turns(keys: list[tuple[str, str]], rows: dict[tuple[str, str], dict[str, Any]]) -> list[tuple[str, str]]:
    """The first of each task, then the second of each, and so on."""
    turn: dict[str | None, int] = {}
    order = []
    for key in keys:
        task = rows[key].get("task")
        turn[task] = turn.get(task, 0) + 1
        order.append((turn[task], str(task), key))
    return [key for _, _, key in sorted(order)]


def _sample(row: dict[str, Any], answers: list[Answer]) -> Sample:
    return Sample(
        corpus=row["corpus"],
        task=_clipped(row.get("task"), 100),
        prompt=clip(row["prompt"]),
        expected=_clipped(row.get("answer")),
        answers=answers,
    )


def _answer(model: str, row: dict[str, Any] | None) -> Answer | None:
    if row is None:
        return None
    return Answer(
        model=model,
        text=clip(row["response"]),
        tokens=row["tokens"],
        verdict=VERDICTS[row["correct"]],
        found=_clipped(row.get("found"), 200),
    )


def _clipped(value: str | None, limit: int = 500) -> str | None:
    return None if value is None else clip(value, limit)
