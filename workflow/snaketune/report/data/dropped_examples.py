"""Examples of what a corpus left out, from the first lines of its records."""

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
class Malformed:
    """A quarantined row."""

    location: str
    detail: str
    excerpt: str


@dataclass(frozen=True, kw_only=True)
class Group:
    """Near duplicates; the excerpt is of the first."""

    rows: int
    ids: list[str]
    excerpt: str


@dataclass(frozen=True, kw_only=True)
class Hit:
    """An n-gram that rows share with an evaluation; `times` among the hits looked at; id and place of the first row."""

    ngram: str
    count: int
    evaluated: str
    id: str
    location: str


@dataclass(frozen=True, kw_only=True)
class DroppedExamples:
    """Of one corpus.

    Attributes:
        quarantined: by reason, the first ones.
        groups: the largest ones.
        hits: the commonest n-grams.
        hits_seen: how many hits were looked at.
    """

    quarantined: dict[str, list[Malformed]]
    groups: list[Group]
    hits: list[Hit]
    hits_read: int


def dropped_examples(corpus: Result) -> DroppedExamples:
    """Raises SnaketuneError if a record is damaged."""
    quarantined: dict[str, list[Malformed]] = {}
    for line in _lines(corpus.artifact, "quarantine.jsonl"):
        same = quarantined.setdefault(line["reason"], [])
        if len(same) < EXAMPLES_PER_REASON:
            detail, excerpt = (clip(line[name], EXCERPT_CHARACTERS) for name in ("detail", "excerpt"))
            same.append(Malformed(location=_location(line), detail=detail, excerpt=excerpt))
    groups = sorted(_lines(corpus.artifact, "duplicates.jsonl"), key=lambda line: -line["rows"])[:GROUPS]
    hits = _lines(corpus.artifact, "contamination.jsonl")
    return DroppedExamples(
        quarantined=quarantined,
        groups=[
            Group(
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
    """As editors understand it: `chat.jsonl:17`; rows of tables by number."""
    return clip(f"{line['file']}:{line['line']}" if "line" in line else f"{line['file']}, row {line.get('row')}", 200)


def _evaluated(line: dict[str, Any]) -> str:
    """`held, row 6a0e`, or of a task's file `tasks/choice.jsonl, line 3`."""
    row = line["evaluated_row"]
    return clip(f"{line['evaluated']}, {row if ' ' in row else f'row {row}'}", 200)


def _lines(artifact: Artifact, name: str) -> list[dict[str, Any]]:
    """The first ones; nothing if the corpus has no such record."""
    if name not in artifact.manifest["records"]:
        return []
    # Rows that can't be decoded are quoted in it as they were found.
    with artifact.file(name).open(encoding="utf-8", errors="replace") as file:
        return [json.loads(line) for line in islice(file, MAX_LINES)]
