"""Sample prompts with the responses of every model, selected by a fixed rule, and the word diff of two responses."""

import re
from collections import Counter
from collections.abc import Mapping
from difflib import SequenceMatcher
from typing import Any

from snaketune.report.data.results import ScoredModel, unique
from snaketune.report.text import clip

VERDICTS = {True: "right", False: "wrong", None: "unchecked"}
# Limit of words to compare: the cost is quadratic.
MAX_WORDS = 300
SAME, ADDED, REMOVED = "same", "added", "removed"
# Each word with its trailing space, so that consecutive changed words are one change.
WORDS = re.compile(r"\w+\s*|[^\w\s]\s*|\s+")

Sample = dict[str, Any]


def choose(
    models: list[ScoredModel], per_corpus: int | None = None, initial_models: Mapping[str, str] | None = None
) -> list[Sample]:
    """Samples of one evaluation for the page: the first prompts of each corpus by id, round-robin over its tasks.

    Args:
        per_corpus: Their number; by default `samples` of the evaluation's config.
        initial_models: The label of the initial model, by model; responses are compared with its response.
    """
    responses_of = {scored.model: {(row["corpus"], row["id"]): row for row in scored.responses} for scored in models}
    rows = {key: row for answered in responses_of.values() for key, row in answered.items()}
    limit = per_corpus or max((scored.result.spec.get("samples", 0) for scored in models), default=0)
    chosen = []
    for corpus in unique(row["corpus"] for row in rows.values()):
        for key in _round_robin([key for key in rows if key[0] == corpus], rows)[:limit]:
            row, responses = rows[key], {model: answered.get(key) for model, answered in responses_of.items()}
            sample = {"corpus": corpus, "task": _clipped(row.get("task"), 100), "prompt": clip(row["prompt"])}
            answers = [
                _answer(model, response, (initial_models or {}).get(model), responses)
                for model, response in responses.items()
                if response
            ]
            chosen.append(sample | {"expected": _clipped(row.get("answer")), "answers": answers})
    return chosen


def _round_robin(keys: list[tuple[str, str]], rows: dict[tuple[str, str], dict[str, Any]]) -> list[tuple[str, str]]:
    """Sort keys: the first of each task, then the second of each, and so on."""
    turn: Counter[str | None] = Counter()
    order = []
    for key in sorted(keys):
        task = rows[key].get("task")
        turn[task] += 1
        order.append((turn[task], str(task), key))
    return [key for _, _, key in sorted(order)]


def _answer(
    model: str, row: dict[str, Any], initial: str | None, responses: dict[str, dict[str, Any] | None]
) -> Sample:
    """One response, with its differences to that of the initial model (`diff_from`) if that answered too."""
    text, earlier = clip(row["response"]), responses.get(initial)
    return {
        "model": model,
        "text": text,
        "diff": word_diff(clip(earlier["response"]), text) if earlier else [(text, SAME)],
        "diff_from": initial if earlier else None,
        "tokens": row["tokens"],
        "verdict": VERDICTS[row["correct"]],
        "extracted": _clipped(row.get("found"), 200),
    }


def _clipped(value: str | None, limit: int = 500) -> str | None:
    return None if value is None else clip(value, limit)


def word_diff(before: str, after: str) -> list[tuple[str, str]]:
    """`after` and what was removed from `before`, as spans of text that are `same`, `added` or `removed`.

    Texts that differ in more than MAX_WORDS words are shown without a diff.

    >>> word_diff("Sure! The answer is 7.", "The answer is 8.")
    [('Sure! ', 'removed'), ('The answer is ', 'same'), ('7', 'removed'), ('8', 'added'), ('.', 'same')]
    """
    old, new = WORDS.findall(before), WORDS.findall(after)
    start = _same_words(old, new)
    end = _same_words(old[start:][::-1], new[start:][::-1])
    middle_old, middle_new = old[start : len(old) - end], new[start : len(new) - end]
    if len(middle_old) > MAX_WORDS or len(middle_new) > MAX_WORDS:
        return [(after, SAME)]
    spans = [("".join(old[:start]), SAME)]
    for what, a, b, c, d in SequenceMatcher(None, middle_old, middle_new, autojunk=False).get_opcodes():
        removed, added = "".join(middle_old[a:b]), "".join(middle_new[c:d])
        spans += [(added, SAME)] if what == "equal" else [(removed, REMOVED), (added, ADDED)]
    spans.append(("".join(new[len(new) - end :]), SAME))
    return [span for span in spans if span[0]]


def _same_words(one: list[str], other: list[str]) -> int:
    """The number of equal words at the beginning."""
    return next((n for n, words in enumerate(zip(one, other)) if words[0] != words[1]), min(len(one), len(other)))
