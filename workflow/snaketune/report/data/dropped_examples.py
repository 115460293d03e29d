"""Examples of quarantined, duplicate and contaminated rows, from the first lines of a corpus' records."""

import json
from collections import Counter
from itertools import islice
from typing import Any

from snaketune.publishing.results import Result
from snaketune.report.text import clip

MAX_LINES = 1000
EXAMPLES_PER_REASON = 3
GROUPS, IDS = 5, 4
NGRAMS = 12
EXCERPT_CHARACTERS = 400


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
