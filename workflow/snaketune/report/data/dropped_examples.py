"""Examples of quarantined, duplicate and contaminated rows, from the first lines of a corpus' records."""

import json
from collections import Counter
from dataclasses import dataclass
from itertools import islice
from typing import Any

from snaketune.artifacts.manifest import Artifact
from snaketune.report.data.results import Result
from snaketune.report.text import clip

MAX_LINES = 1000
EXAMPLES_PER_REASON = 3
GROUPS, IDS = 5, 4
NGRAMS = 12
EXCERPT_CHARACTERS = 400


@dataclass(frozen=True, kw_only=True)
class QuarantinedExample:
    """A quarantined row."""

    location: str
    detail: str
    excerpt: str


@dataclass(frozen=True, kw_only=True)
class DuplicateGroup:
    """A group of near duplicates, with an excerpt of the first."""

    rows: int
    ids: list[str]
    excerpt: str


@dataclass(frozen=True, kw_only=True)
class Hit:
    """An n-gram that rows share with an evaluation: its count in the hits read, and id and location of the first row."""

    ngram: str
    count: int
    evaluated: str
    id: str
    location: str


@dataclass(frozen=True, kw_only=True)
class DroppedExamples:
    """Examples of one corpus.

    Attributes:
        quarantined: The first rows of each reason.
        groups: The largest groups of near duplicates.
        hits: The most frequent n-grams.
        hits_read: Number of contamination hits read.
    """

    quarantined: dict[str, list[QuarantinedExample]]
    groups: list[DuplicateGroup]
    hits: list[Hit]
    hits_read: int


def dropped_examples(corpus: Result) -> DroppedExamples:
    """Read the examples of a corpus. Raises SnaketuneError if a record is damaged."""
    quarantined: dict[str, list[QuarantinedExample]] = {}
    for line in _lines(corpus.artifact, "quarantine.jsonl"):
        examples = quarantined.setdefault(line["reason"], [])
        if len(examples) < EXAMPLES_PER_REASON:
            detail, excerpt = (clip(line[name], EXCERPT_CHARACTERS) for name in ("detail", "excerpt"))
            examples.append(QuarantinedExample(location=_location(line), detail=detail, excerpt=excerpt))
    groups = sorted(_lines(corpus.artifact, "duplicates.jsonl"), key=lambda line: -line["rows"])[:GROUPS]
    hits = _lines(corpus.artifact, "contamination.jsonl")
    return DroppedExamples(
        quarantined=quarantined,
        groups=[
            DuplicateGroup(
                rows=line["rows"],
                ids=[clip(i, 40) for i in line["ids"][:IDS]],
                excerpt=clip(line["excerpt"], EXCERPT_CHARACTERS),
            )
            for line in groups
        ],
        hits=_commonest(hits),
        hits_read=len(hits),
    )


def _commonest(lines: list[dict[str, Any]]) -> list[Hit]:
    count = Counter((line["evaluated"], line["ngram"]) for line in lines)
    first: dict[tuple[str, str], dict[str, Any]] = {}
    for line in lines:
        first.setdefault((line["evaluated"], line["ngram"]), line)
    return [
        Hit(
            ngram=clip(ngram, EXCERPT_CHARACTERS),
            count=n,
            evaluated=_evaluated(first[evaluated, ngram]),
            id=clip(first[evaluated, ngram]["id"], 40),
            location=_location(first[evaluated, ngram]),
        )
        for (evaluated, ngram), n in count.most_common(NGRAMS)
    ]


def _location(line: dict[str, Any]) -> str:
    """`chat.jsonl:17`, as editors understand it; for tables, `data.parquet, row 17`."""
    return clip(f"{line['file']}:{line['line']}" if "line" in line else f"{line['file']}, row {line.get('row')}", 200)


def _evaluated(line: dict[str, Any]) -> str:
    """The evaluation row: `held, row 6a0e`, or for the file of a task `tasks/choice.jsonl, line 3`."""
    row = line["evaluated_row"]
    return clip(f"{line['evaluated']}, {row if ' ' in row else f'row {row}'}", 200)


def _lines(artifact: Artifact, name: str) -> list[dict[str, Any]]:
    """The first MAX_LINES lines of a record; empty if the corpus doesn't have it."""
    if name not in artifact.manifest["records"]:
        return []
    # Records quote undecodable rows byte for byte.
    with artifact.file(name).open(encoding="utf-8", errors="replace") as file:
        return [json.loads(line) for line in islice(file, MAX_LINES)]
