"""Texts that the pages show as samples.

Prompts with the responses of every model, selected by a fixed rule, and the word diff of two responses; answers while training;
examples of quarantined, duplicate and contaminated rows, from the first lines of a corpus' records; and tokenized rows as spans
that are supervised or not.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping
from difflib import SequenceMatcher
from itertools import islice
from typing import Any

from snaketune.publishing.results import Result
from snaketune.publishing.scored_models import ScoredModel
from snaketune.report.data.corpus_flow import tokenized_corpora
from snaketune.report.data.results import ResultSet, measurements, unique
from snaketune.text import clip

TOKENIZER = "tokenizer.json"
SPAN_CHARACTERS = 1200

MAX_LINES = 1000
EXAMPLES_PER_REASON = 3
GROUPS, IDS = 5, 4
NGRAMS = 12
EXCERPT_CHARACTERS = 400

# Answers of a prompt on the page; of more measurements, some in between are left out.
ANSWERS = 6

VERDICTS = {True: "right", False: "wrong", None: "unchecked"}
# Limit of words to compare: the cost is quadratic.
MAX_WORDS = 500
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

    Texts of more than MAX_WORDS words are shown without a diff.

    >>> word_diff("Sure! The answer is 7.", "The answer is 8.")
    [('Sure! ', 'removed'), ('The answer is ', 'same'), ('7', 'removed'), ('8', 'added'), ('.', 'same')]
    >>> word_diff("5 See you soon!", "5")
    [('5', 'same'), ('See you soon!', 'removed')]
    """
    old, new = WORDS.findall(before), WORDS.findall(after)
    if len(old) > MAX_WORDS or len(new) > MAX_WORDS:
        return [(after, SAME)]
    spans = []
    # A word is the same whatever space follows it.
    compared = ([word.strip() for word in words] for words in (old, new))
    for what, a, b, c, d in SequenceMatcher(None, *compared, autojunk=False).get_opcodes():
        removed, added = "".join(old[a:b]), "".join(new[c:d])
        spans += [(added, SAME)] if what == "equal" else [(removed, REMOVED), (added, ADDED)]
    return [span for span in spans if span[0]]


def answers_while_training(results: ResultSet) -> list[dict[str, Any]]:
    """The sample prompts of each training with their expected answer, and the answers by step.

    Returns: per training and prompt: `label`, `prompt`, `expected`, and `answers`, a list of (step, text).
    """
    return [
        {
            "label": run.label,
            "prompt": clip(points[0]["samples"][number]["prompt"]),
            "expected": clip(points[0]["samples"][number]["expected"]),
            "answers": [(point["step"], clip(point["samples"][number]["answer"])) for point in _some(points)],
        }
        for run in results.of("sft", "dpo")
        if (points := [point for point in measurements(run) if point.get("samples")])
        for number in range(len(points[0]["samples"]))
    ]


def _some(points: list[Any]) -> list[Any]:
    """The first and the last of them, and some between.

    >>> _some(list(range(11))), _some([0, 1])
    ([0, 2, 4, 6, 8, 10], [0, 1])
    """
    if len(points) <= ANSWERS:
        return points
    return [points[round(n * (len(points) - 1) / (ANSWERS - 1))] for n in range(ANSWERS)]


def dropped_examples(corpus: Result) -> dict[str, Any]:
    """The examples of a corpus for the page.

    Returns:
        `quarantined`, the first rows of each reason; `groups`, the largest groups of near duplicates; `hits`, the n-grams most
        frequently shared with evaluations, of the first `hits_read` hits.
    Raises:
        SnaketuneError: If a record is damaged.
    """
    quarantined: dict[str, list[dict[str, str]]] = {}
    for line in _lines(corpus, "quarantine.jsonl"):
        examples = quarantined.setdefault(line["reason"], [])
        if len(examples) < EXAMPLES_PER_REASON:
            texts = {name: clip(line[name], EXCERPT_CHARACTERS) for name in ("detail", "excerpt")}
            examples.append({"location": _location(line)} | texts)
    groups = sorted(_lines(corpus, "duplicates.jsonl"), key=lambda line: -line["rows"])[:GROUPS]
    hits = _lines(corpus, "contamination.jsonl")
    return {
        "quarantined": quarantined,
        "groups": [
            {
                "rows": line["rows"],
                "ids": [clip(id, 40) for id in line["ids"][:IDS]],
                "excerpt": clip(line["excerpt"], EXCERPT_CHARACTERS),
            }
            for line in groups
        ],
        "hits": _commonest(hits),
        "hits_read": len(hits),
    }


def _commonest(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The most frequent n-grams, each with its count, the evaluation row, and id and location of the first training row."""
    count = Counter((line["evaluated"], line["ngram"]) for line in lines)
    first = {(line["evaluated"], line["ngram"]): line for line in reversed(lines)}
    hits = []
    for (evaluated, ngram), n in count.most_common(NGRAMS):
        line = first[evaluated, ngram]
        # `held, row 6a0e`, or for the file of a task `tasks/choice.jsonl, line 3`.
        row = line["evaluated_row"] if " " in line["evaluated_row"] else f"row {line['evaluated_row']}"
        about = {"evaluated": clip(f"{evaluated}, {row}", 200), "id": clip(line["id"], 40), "location": _location(line)}
        hits.append({"ngram": clip(ngram, EXCERPT_CHARACTERS), "count": n} | about)
    return hits


def _location(line: dict[str, Any]) -> str:
    """`chat.jsonl:17`, as editors understand it; for tables, `data.parquet, row 17`."""
    return clip(f"{line['file']}:{line['line']}" if "line" in line else f"{line['file']}, row {line.get('row')}", 200)


def _lines(corpus: Result, name: str) -> list[dict[str, Any]]:
    """The first MAX_LINES lines of a record; empty if the corpus doesn't have it."""
    if name not in corpus.manifest["records"]:
        return []
    # Records quote undecodable rows byte for byte.
    with corpus.artifact.file(name).open(encoding="utf-8", errors="replace") as file:
        return [json.loads(line) for line in islice(file, MAX_LINES)]


def tokenized_rows(results: ResultSet) -> list[dict[str, Any]]:
    """Every tokenized corpus (`flow`), whether it is `paired`, what is supervised, and the spans of its first rows (`samples`),
    shorter ones first.

    Raises:
        SnaketuneError: If a tokenizer is damaged.
    """
    corpora = []
    for flow in tokenized_corpora(results):
        parts = flow.parts
        samples = next((part.manifest["samples"] for part in parts if part.manifest.get("samples")), [])
        tokenizer = results.first(parts[0], "tokenizer")
        tokens = special_tokens(tokenizer) if tokenizer else []
        paired = parts[0].manifest["kind"] == "preference"
        about = {"flow": flow, "paired": paired, "train_on": parts[0].manifest["train_on"]}
        corpora.append(about | {"samples": [spans(sample, tokens) for sample in samples]})
    return corpora


def spans(sample: list[Any], special: list[str]) -> list[dict[str, Any]]:
    """Split sample text at special tokens.

    >>> [tuple(span.values()) for span in spans([["<s>Hi", False], ["Yes</s>", True]], ["<s>", "</s>"])]
    [('<s>', False, True), ('Hi', False, False), ('Yes', True, False), ('</s>', True, True)]
    """
    longest_first = sorted(special, key=len, reverse=True)
    pattern = re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")
    return [
        {"text": clip(text, SPAN_CHARACTERS), "supervised": bool(supervised), "special": bool(number % 2)}
        for part, supervised in sample
        # The matches of a group are at odd positions.
        for number, text in enumerate(pattern.split(part))
        if text
    ]


def special_tokens(tokenizer: Result) -> list[str]:
    """The special tokens of a tokenizer; empty if it has no tokenizer.json."""
    if TOKENIZER not in tokenizer.manifest["payload"]:
        return []
    content = json.loads(tokenizer.artifact.file(TOKENIZER).read_text(encoding="utf-8"))
    return [token["content"] for token in content.get("added_tokens", []) if token.get("special")]
