"""Compare two models' responses to the same held-out prompts by a judge: the work of the `compare` stage.

    win_rate.json     `win_rates.win_rate`, and how many pairs were equal and so weren't asked for
    verdicts.arrow    corpus, id, first and second (1: the model's response is better, 0: the other's, 0.5: a tie, null:
                      unreadable; with the model's response shown first, and second), first_reply, second_reply

Each pair is asked for in both orders.
"""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from snaketune.artifacts.manifest import Artifact
from snaketune.config.operation import Execution
from snaketune.errors import SnaketuneError
from snaketune.evaluation.win_rates import win_rate
from snaketune.files import write_json
from snaketune.patterns import search_last
from snaketune.sampling.judge_models import judge_of
from snaketune.sampling.judge_questions import ask, question, read_rubric
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.outcome import Outcome
from snaketune.stages.specs import CompareSpec
from snaketune.tables import write_table

VERDICTS = pa.schema(
    [
        *((name, pa.string()) for name in ("corpus", "id")),
        *((name, pa.float64()) for name in ("first", "second")),
        *((name, pa.string()) for name in ("first_reply", "second_reply")),
    ]
)
FORM = 'End with a line "Verdict: A", "Verdict: B" or "Verdict: tie".'
TASK = f"Which response is better by the rubric, A or B? Their order says nothing about them. {FORM}"
# At the end of a line: "Verdict: A is not as good as B" is none.
VERDICT = r"(?im)verdict:[\s*\"]*(?:a\s+)?(A|B|tie)[\s*.\"]*$"
VALUES = {"a": 1.0, "b": 0.0, "tie": 0.5}
TIE = 0.5


def build(
    spec: CompareSpec,
    work: WorkFolder,
    *,
    evaluated: Artifact,
    opponent: Artifact,
    tokenizer: Sequence[Artifact] = (),
    model: Sequence[Artifact] = (),
    base_layers: Sequence[Artifact] = (),
    rubric: Sequence[Path],
    base: Sequence[Path] = (),
    operation: Execution,
) -> Outcome:
    """Write the files above to `work.payload`.

    Args:
        opponent: the evaluation of the other model; the rest as in the stage `judge`.
    Raises:
        SnaketuneError: the evaluations have no prompt in common, or no reply can be read.
    """
    results = (*model, *base_layers)
    judge = judge_of(spec, work, tokenizer=tokenizer, results=results, base_files=base, operation=operation)
    ours, theirs = (
        {(row["corpus"], row["id"]): row for row in map(json.loads, _lines(result.file("responses.jsonl")))}
        for result in (evaluated, opponent)
    )
    keys = _first([key for key in ours if key in theirs], spec.prompts)
    if not keys:
        raise SnaketuneError(
            "the evaluations have no response to the same prompt; a judge needs eval.NAME.conversations with held-out rows"
        )
    text = read_rubric(rubric[0])
    asked = [key for key in keys if ours[key]["response"] != theirs[key]["response"]]
    questions = [
        question(text, {"conversation": ours[key]["prompt"], "response A": first, "response B": second}, TASK)
        for key in asked
        for first, second in _orders(ours[key]["response"], theirs[key]["response"])
    ]
    found = ask(judge, questions, _verdict, FORM) if questions else []
    readable = sum(value is not None for value, _, _ in found)
    if questions and not readable:
        example = next((reply for _, reply, _ in found if reply), "")
        raise SnaketuneError(
            f"none of the {len(found)} verdicts can be read; the judge replied, for one, {example[-200:]!r}"
        )
    verdicts: dict[tuple[str, str], dict[str, Any]] = {}
    for number, key in enumerate(asked):
        (first, first_reply, _), (second, second_reply, _) = found[2 * number : 2 * number + 2]
        # Shown second, the model's response is B.
        second = None if second is None else 1.0 - second
        verdicts[key] = {"first": first, "second": second, "first_reply": first_reply, "second_reply": second_reply}
    equal = {"first": TIE, "second": TIE, "first_reply": None, "second_reply": None}
    rows = [
        {"corpus": key[0], "id": key[1], **verdicts.get(key, equal)}
        | {"tokens": ours[key]["tokens"], "opponent_tokens": theirs[key]["tokens"]}
        for key in keys
    ]
    write_table(work.payload / "verdicts.arrow", pa.Table.from_pylist(rows, schema=VERDICTS))
    truncated = {
        name: _truncated([rows_of[key] for key in keys], result)
        for name, rows_of, result in (("truncated", ours, evaluated), ("opponent_truncated", theirs, opponent))
    }
    scores = win_rate(rows) | truncated | {"equal": len(keys) - len(asked)}
    write_json(work.payload / "win_rate.json", scores)
    again = sum(times == 2 for _, _, times in found)
    counts = {"prompts": len(keys), "verdicts": len(found), "readable": readable, "asked_again": again}
    return Outcome(counts=counts, about=judge.about(), run=judge.run())


def _first(keys: list[tuple[str, str]], most: int) -> list[tuple[str, str]]:
    """The first keys of each corpus.

    >>> _first([("a", "1"), ("b", "1"), ("a", "2"), ("a", "3")], 2)
    [('a', '1'), ('b', '1'), ('a', '2')]
    """
    counted: Counter[str] = Counter()
    chosen = []
    for corpus, id in keys:
        counted[corpus] += 1
        if counted[corpus] <= most:
            chosen.append((corpus, id))
    return chosen


def _lines(path: Path) -> list[str]:
    # Not by splitlines, which also splits at characters inside texts.
    return [line for line in path.read_text(encoding="utf-8").split("\n") if line]


def _truncated(rows: list[dict[str, Any]], evaluation: Artifact) -> float:
    """The share of responses that are as long as they may be."""
    most = evaluation.manifest["spec"]["generation"]["max_new_tokens"]
    return round(sum(row["tokens"] >= most for row in rows) / len(rows), 4)


def _orders(ours: str, theirs: str) -> tuple[tuple[str, str], tuple[str, str]]:
    return (ours, theirs), (theirs, ours)


def _verdict(reply: str) -> float | None:
    """1 for the response shown first, 0 for the second, 0.5 for a tie; None if the reply names none."""
    match = search_last(VERDICT, reply)
    return VALUES[match.group(1).lower()] if match else None
