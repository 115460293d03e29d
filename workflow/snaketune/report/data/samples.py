"""Sample prompts with the responses of every model, selected by a fixed rule."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from snaketune.report.compare.word_diff import SAME, word_diff
from snaketune.report.data.results import ScoredModel, unique
from snaketune.report.text import clip

VERDICTS = {True: "right", False: "wrong", None: "unchecked"}


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The response of one model; `verdict` is right, wrong or unchecked.

    Attributes:
        diff: The text as spans; if its initial model answered too, with the differences to that model's response.
        diff_from: The initial model; None if it didn't answer.
        extracted: The final answer that was extracted from the response.
    """

    model: str
    text: str
    diff: list[tuple[str, str]]
    diff_from: str | None
    tokens: int
    verdict: str
    extracted: str | None


@dataclass(frozen=True, kw_only=True)
class SampledPrompt:
    """One prompt and all responses to it."""

    corpus: str
    task: str | None
    prompt: str
    expected: str | None
    answers: list[Answer]


def choose(
    models: list[ScoredModel], per_corpus: int | None = None, initial_models: Mapping[str, str] | None = None
) -> list[SampledPrompt]:
    """Samples of one evaluation: the first prompts of each corpus by id, round-robin over its tasks.

    Args:
        per_corpus: Their number; by default `samples` of the evaluation's config.
        initial_models: The label of the initial model, by model.
    """
    responses_of = {scored.model: {(row["corpus"], row["id"]): row for row in scored.responses} for scored in models}
    rows = {key: row for answered in responses_of.values() for key, row in answered.items()}
    limit = per_corpus or max((scored.result.spec.get("samples", 0) for scored in models), default=0)
    chosen = []
    for corpus in unique(row["corpus"] for row in rows.values()):
        keys = sorted(key for key in rows if key[0] == corpus)
        for key in _round_robin(keys, rows)[:limit]:
            responses = {model: answered.get(key) for model, answered in responses_of.items()}
            answers = [_answer(model, responses, (initial_models or {}).get(model)) for model in responses]
            chosen.append(_sample(rows[key], [answer for answer in answers if answer]))
    return chosen


def _round_robin(keys: list[tuple[str, str]], rows: dict[tuple[str, str], dict[str, Any]]) -> list[tuple[str, str]]:
    """Reorder keys: the first of each task, then the second of each, and so on."""
    turn: dict[str | None, int] = {}
    order = []
    for key in keys:
        task = rows[key].get("task")
        turn[task] = turn.get(task, 0) + 1
        order.append((turn[task], str(task), key))
    return [key for _, _, key in sorted(order)]


def _sample(row: dict[str, Any], answers: list[Answer]) -> SampledPrompt:
    return SampledPrompt(
        corpus=row["corpus"],
        task=_clipped(row.get("task"), 100),
        prompt=clip(row["prompt"]),
        expected=_clipped(row.get("answer")),
        answers=answers,
    )


def _answer(model: str, responses: dict[str, dict[str, Any] | None], diff_from: str | None) -> Answer | None:
    row = responses[model]
    if row is None:
        return None
    text, earlier = clip(row["response"]), responses.get(diff_from)
    return Answer(
        model=model,
        text=text,
        diff=word_diff(clip(earlier["response"]), text) if earlier else [(text, SAME)],
        diff_from=diff_from if earlier else None,
        tokens=row["tokens"],
        verdict=VERDICTS[row["correct"]],
        extracted=_clipped(row.get("found"), 200),
    )


def _clipped(value: str | None, limit: int = 500) -> str | None:
    return None if value is None else clip(value, limit)
