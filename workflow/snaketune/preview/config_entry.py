"""Lines for a config: an entry of `corpora:` that reads a file as the preview did.

What the user has to decide (rows to drop, repairs) is in it as comments. Where no layout is known, `fields` are suggested by
the names of the columns.
"""

import re
from collections import defaultdict
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from snaketune.config.corpora import CorpusContent
from snaketune.config.corpus_sources import Source
from snaketune.config.row_fields import Fields
from snaketune.corpus.layouts.unstated import names_metadata
from snaketune.corpus.values.turns import are_turns
from snaketune.preview.reading import Reading

# For each field, words in the names of columns that hold it, the likeliest first.
NAMES = {
    "chosen": "chosen preferred better winner accepted best positive good win",
    "rejected": "rejected dispreferred worse loser refused worst negative bad lose",
    "response": "response answer reply completion output assistant solution target bot agent gpt a",
    "prompt": "prompt question instruction query input user human customer request problem task title q",
    "system": "system",
    "text": "text content document body article passage story page raw",
}
GROUPS = {"preferences": ("prompt", "chosen", "rejected"), "conversations": ("prompt", "response"), "text": ("text",)}
ALIKE = 0.8
# The longest column is suggested as a document if its texts have at least so many characters on average.
DOCUMENT = 200

NO_NAME = re.compile(r"[^A-Za-z0-9_.-]+")
DATA_SUFFIXES = re.compile(
    r"(\.(jsonl?|ndjson|csv|tsv|parquet|arrow|txt|md|gz|xz|zst|zip|tar|tgz|txz))+$", re.IGNORECASE
)
# The limit of a corpus whose config doesn't set one.
MAX_QUARANTINED = CorpusContent.model_fields["max_quarantined_fraction"].default


def entry(file: str, source: Source, reading: Reading, rows_read: int, repairs: dict[str, int], repaired: int) -> str:
    """The lines of the entry.

    Args:
        rows_read: number of raw rows read.
        repairs: repairs that help, with the number of rows that each changes.
        repaired: number of rows that could be read with these repairs, in addition.
    """
    source_keys = source.model_dump(mode="json", exclude_defaults=True)
    if reading.frame:
        source_keys |= {"frame": reading.frame.model_dump(exclude_defaults=True)}
    if reading.in_question:
        stated = {"layout": next(iter(reading.layouts))} if len(reading.layouts) == 1 else {}
        source_keys |= stated | {"ignore": [*source.ignore, *reading.in_question]}
    corpora = {name_for(file): {"kind": reading.kind, "sources": [source_keys]}}
    lines = yaml.safe_dump(
        {"corpora": corpora}, sort_keys=False, default_flow_style=None, allow_unicode=True, width=10_000
    ).splitlines()
    for where, count in conditions(reading):
        lines.append(f"      # where: {where}   # drops {count:,} of the {rows_read:,} sampled rows")
    if repaired:
        steps = ", ".join(repairs)
        lines.append(f"    # repair: [{steps}]   # fixes {repaired:,} of the {rows_read:,} sampled rows")
    share = reading.quarantined.total() / max(1, rows_read)
    if share > MAX_QUARANTINED:
        lines.append(
            f"    # max_quarantined_fraction: {min(1.0, round(1.5 * share + 0.005, 2))}   # {share:.1%} of the sampled rows "
            f"can't be read, and more than {MAX_QUARANTINED:.0%} makes the corpus stage fail"
        )
    return "\n".join(lines)


def name_for(file: str) -> str:
    """The file's name as a valid name of a corpus.

    >>> name_for("data/Täglich Fragen.jsonl.gz")
    'T-glich-Fragen'
    """
    return NO_NAME.sub("-", DATA_SUFFIXES.sub("", Path(file).name)).strip("-._")[:80] or "corpus"


def conditions(reading: Reading) -> list[tuple[str, int]]:
    """Conditions for `where` that drop rows marked as bad, and how many each drops, most first."""
    return [(mark.replace(": ", " != ", 1), count) for mark, count in reading.marked.most_common()]


def suggested(rows: list[dict[str, Any]]) -> tuple[str, Fields] | None:
    """The kind and the `fields` by which rows could be read; None if no columns fit."""
    for row in rows:
        for column, value in row.items():
            if are_turns(value) and len(value) > 1:
                return "conversations", Fields(messages=column)
    texts = _text_columns(rows)
    if _are_compared(texts):
        # Two answers to one prompt, of which a column of another name or type says which is better.
        return None
    for kind, group in GROUPS.items():
        remaining = list(texts)
        columns: dict[str, str] = {}
        # The prompt last, because its names are the least specific; the system text after it, which may be absent.
        for field in (*reversed(group), *(("system",) if kind != "text" else ())):
            if column := _nearest(remaining, NAMES[field].split()):
                columns[field] = column
                remaining.remove(column)
        if kind == "text" and not columns and texts:
            longest = max(texts, key=texts.__getitem__)
            columns = {"text": longest} if texts[longest] >= DOCUMENT else {}
        if kind == "conversations" and len(texts) == 2 and columns.keys().isdisjoint(group):
            # For instance column names in another language: the question is mostly first.
            columns = dict(zip(group, texts))
        if columns.keys() >= set(group):
            return kind, Fields(**{field: columns[field] for field in NAMES if field in columns})
    return None


def _are_compared(columns: Iterable[str]) -> bool:
    """Whether two columns have the same name but for a last A and B, or 1 and 2.

    >>> _are_compared(["q", "reply_a", "reply_b"]), _are_compared(["answer2", "answer1"]), _are_compared(["a", "b"])
    (True, True, False)
    """
    names = {column.casefold() for column in columns}
    pairs = (("a", "b"), ("1", "2"), ("0", "1"))
    return any(
        len(name) > 1 and name.endswith(first) and name.removesuffix(first) + second in names
        for name in names
        for first, second in pairs
    )


def _text_columns(rows: list[dict[str, Any]]) -> dict[str, float]:
    """The columns that hold texts in at least half of the rows, in order, with their average length, but for those named as
    metadata."""
    lengths: dict[str, list[int]] = defaultdict(list)
    for row in rows:
        for column, value in row.items():
            if column and isinstance(value, str) and value.strip() and not names_metadata(column):
                lengths[column].append(len(value))
    return {column: sum(values) / len(values) for column, values in lengths.items() if 2 * len(values) >= len(rows)}


def _nearest(columns: Iterable[str], names: list[str]) -> str | None:
    """The column whose name has a word of `names`, the likeliest first; else one with a similar name.

    >>> _nearest(["customer_question", "agentReply"], ["answer", "reply"])
    'agentReply'
    """
    words = {column: _words(column) for column in columns}
    for name in names:
        # The last word decides: `question_title` is a title, `title_of_question` is anything.
        last = (column for column, name_words in words.items() if name_words[-1:] == [name])
        anywhere = (column for column, name_words in words.items() if name in name_words)
        if column := next(last, None) or next(anywhere, None):
            return column
    plain = {"".join(name_words): column for column, name_words in words.items()}
    alike = (match for name in names if len(name) > 3 for match in get_close_matches(name, plain, 1, ALIKE))
    return next((plain[match] for match in alike), None)


def _words(column: str) -> list[str]:
    separated = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", column)
    return [word.casefold() for word in re.findall(r"[^\W_]+", separated)]
