"""Suggested `fields` for rows without a known layout, by the names of their columns."""

import re
from collections import defaultdict
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

from snaketune.config.corpus_sources import Fields
from snaketune.corpus.layouts.messages import are_turns

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


def suggested(rows: list[dict[str, Any]]) -> tuple[str, Fields] | None:
    """Return the kind and the `fields` by which rows could be read; None if no columns fit."""
    for row in rows:
        for column, value in row.items():
            if are_turns(value) and len(value) > 1:
                return "conversations", Fields(messages=column)
    texts = _text_columns(rows)
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


def _text_columns(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return the columns that hold texts in at least half of the rows, in order, with their average length."""
    lengths: dict[str, list[int]] = defaultdict(list)
    for row in rows:
        for column, value in row.items():
            if column and isinstance(value, str) and value.strip():
                lengths[column].append(len(value))
    return {column: sum(values) / len(values) for column, values in lengths.items() if 2 * len(values) >= len(rows)}


def _nearest(columns: Iterable[str], names: list[str]) -> str | None:
    """Return the column whose name has a word of `names`, the likeliest first; else one with a similar name.

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
