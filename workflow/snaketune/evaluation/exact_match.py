"""Exact match: answers extracted from responses to held-out prompts, compared with the expected ones."""

from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from snaketune.config.evaluations import ExactMatch
from snaketune.errors import SnaketuneError
from snaketune.evaluation.score_intervals import share_interval
from snaketune.patterns import TooSlow, search
from snaketune.sampling.answers import same_answer


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A held-out conversation up to its last assistant turn, and the expected answer (None: not checkable)."""

    id: str
    corpus: str
    task: str | None
    messages: list[dict[str, str]]
    tools: str | None = None
    template_variables: str | None = None
    answer: str | None


@dataclass(frozen=True, kw_only=True)
class Response:
    """A model's response to a prompt, its length in tokens, the expected answer and the one found in it (None if the
    pattern doesn't match); `correct` is None if the prompt isn't checkable."""

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
    """Up to `limit` checkable prompts, plus others up to `samples` in all; by id, so that all models get the same.
    Text documents have no prompts."""
    rows = sorted(held_out.to_pylist(), key=lambda row: row["id"])
    rows = [row for row in rows if row["messages"][-1]["role"] == "assistant"]
    checkable = [row for row in rows if row["answer"] is not None][:limit]
    others = [row for row in rows if row["answer"] is None][: max(0, samples - len(checkable))]
    return [
        Prompt(
            corpus=corpus,
            messages=[{"role": turn["role"], "content": turn["content"]} for turn in row["messages"][:-1]],
            template_variables=row.get("template_variables"),
            **{name: row[name] for name in ("id", "task", "tools", "answer")},
        )
        for row in checkable + others
    ]


def judge(prompt: Prompt, response: str, tokens: int, spec: ExactMatch) -> Response:
    """Extract the answer from a response and compare it with the expected one."""
    try:
        match = search(spec.answer_pattern, response)
    except TooSlow as error:
        raise SnaketuneError(f"exact_match.answer_pattern, prompt {prompt.id} of {prompt.corpus}: {error}") from None
    found = match.group(1).strip() if match and match.group(1) is not None else None
    context = {"tools": prompt.tools, "template_variables": prompt.template_variables}
    return Response(
        id=prompt.id,
        corpus=prompt.corpus,
        task=prompt.task,
        prompt="\n".join(
            [f"[{name}] {value}" for name, value in context.items() if value]
            + [f"[{message['role']}] {message['content']}" for message in prompt.messages]
        ),
        response=response,
        tokens=tokens,
        answer=prompt.answer,
        found=found,
        correct=None if prompt.answer is None else found is not None and same_answer(found, prompt.answer),
    )


def summarize(responses: list[Response]) -> dict[str, Any]:
    """Shares of correct answers, overall and by task, with 95% intervals, and the mean length of the responses."""
    checked = [response for response in responses if response.correct is not None]
    by_task: dict[str, list[Response]] = {}
    for response in checked:
        by_task.setdefault(response.task or "(none)", []).append(response)
    lengths = [response.tokens for response in responses]
    return {
        **_share(checked),
        "mean_response_tokens": round(sum(lengths) / len(lengths), 2) if lengths else None,
        "by_task": {task: _share(by_task[task]) for task in sorted(by_task)},
    }


def _share(checked: list[Response]) -> dict[str, Any]:
    size, correct = len(checked), sum(response.correct for response in checked)
    share = correct / size if size else None
    rounded = None if share is None else round(share, 4)
    return {"prompts": size, "correct": correct, "share": rounded, "share_interval": share_interval(share, size)}
