"""Exact match: answers extracted from responses to held-out prompts, compared with the expected ones."""

import re
from dataclasses import asdict, dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

import pyarrow as pa

from snaketune.config.evaluations import ExactMatch
from snaketune.errors import SnaketuneError
from snaketune.evaluation.score_intervals import share_interval
from snaketune.patterns import TooSlow, search

# 1,234 and -12,345,678.5
GROUPED = re.compile(r"[+-]?\d{1,3}(,\d{3})+(\.\d*)?")


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A held-out conversation up to its last assistant turn, and the expected answer (None: not checkable)."""

    id: str
    corpus: str
    task: str | None
    messages: list[dict[str, str]]
    tools: str | None = None
    answer: str | None


@dataclass(frozen=True, kw_only=True)
class Response:
    """A model's response to a prompt.

    Attributes:
        tokens: length of the response in tokens.
        answer: the expected answer.
        found: the answer extracted from the response; None if the pattern doesn't match.
        correct: None if the prompt isn't checkable.
    """

    id: str
    corpus: str
    task: str | None
    prompt: str
    response: str
    tokens: int
    answer: str | None
    found: str | None
    correct: bool | None


def choose_prompts(corpus: str, held_out: pa.Table, limit: int | None, samples: int) -> list[Prompt]:
    """Return up to `limit` checkable prompts, plus others up to `samples` in all; by id, so that all models get the same.

    Text documents have no prompts, so a corpus of kind text gives none.
    """
    rows = sorted(held_out.to_pylist(), key=lambda row: row["id"])
    rows = [row for row in rows if row["messages"][-1]["role"] == "assistant"]
    checkable = [row for row in rows if row["answer"] is not None][:limit]
    others = [row for row in rows if row["answer"] is None][: max(0, samples - len(checkable))]
    return [
        Prompt(
            id=row["id"],
            corpus=corpus,
            task=row["task"],
            messages=[{"role": turn["role"], "content": turn["content"]} for turn in row["messages"][:-1]],
            tools=row["tools"],
            answer=row["answer"],
        )
        for row in checkable + others
    ]


def judge(prompt: Prompt, response: str, tokens: int, spec: ExactMatch) -> Response:
    """Extract the answer from a response and compare it with the expected one."""
    try:
        match = search(spec.answer_pattern, response)
    except TooSlow as error:
        raise SnaketuneError(f"exact_match.answer_pattern, prompt {prompt.id} of {prompt.corpus}: {error}") from None
    extracted = match.group(1).strip() if match and match.group(1) is not None else None
    correct = None if prompt.answer is None else extracted is not None and same_answer(extracted, prompt.answer)
    return Response(
        id=prompt.id,
        corpus=prompt.corpus,
        task=prompt.task,
        prompt="\n".join(
            [f"[tools] {prompt.tools}"] * bool(prompt.tools)
            + [f"[{message['role']}] {message['content']}" for message in prompt.messages]
        ),
        response=response,
        tokens=tokens,
        answer=prompt.answer,
        found=extracted,
        correct=correct,
    )


def same_answer(extracted: str, expected: str) -> bool:
    """Return True if answers are equal as text or as numbers; commas count as thousands separators only.

    >>> same_answer("1,200", "1200.0"), same_answer("cat", "Cat"), same_answer("7", "7 "), same_answer("3,5", "35")
    (True, False, True, False)
    """
    if extracted.strip() == expected.strip():
        return True
    numbers = [_number(extracted), _number(expected)]
    return None not in numbers and numbers[0] == numbers[1]


def _number(text: str) -> Decimal | None:
    digits = text.strip().removeprefix("$").rstrip(".,")
    if GROUPED.fullmatch(digits):
        digits = digits.replace(",", "")
    if "," in digits or "_" in digits:
        return None
    try:
        number = Decimal(digits)
    except InvalidOperation:
        return None
    return number if number.is_finite() else None


def summarize(responses: list[Response]) -> dict[str, Any]:
    """Return shares of correct answers, overall and by task, with 95% intervals, and the mean length of the responses."""
    checked = [response for response in responses if response.correct is not None]
    by_task: dict[str, dict[str, Any]] = {}
    for response in checked:
        entry = by_task.setdefault(response.task or "(none)", {"prompts": 0, "correct": 0})
        entry["prompts"] += 1
        entry["correct"] += int(response.correct)
    for entry in by_task.values():
        entry["share"] = round(entry["correct"] / entry["prompts"], 4)
        entry["share_interval"] = share_interval(entry["correct"] / entry["prompts"], entry["prompts"])
    correct = sum(entry["correct"] for entry in by_task.values())
    return {
        "prompts": len(checked),
        "correct": correct,
        "share": round(correct / len(checked), 4) if checked else None,
        "share_interval": share_interval(correct / len(checked), len(checked)) if checked else None,
        "mean_response_tokens": round(sum(r.tokens for r in responses) / len(responses), 2) if responses else None,
        "by_task": dict(sorted(by_task.items())),
    }


def as_rows(responses: list[Response]) -> list[dict[str, Any]]:
    """Return the rows of responses.jsonl."""
    return [asdict(response) for response in responses]
