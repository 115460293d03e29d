"""Suggested `fields` for rows without a known layout, by the names of their columns."""

import re
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

from snaketune.config.corpus_sources import Fields
from snaketune.corpus.layouts.messages import SPEAKER_KEYS
from snaketune.preview.sample import FileSample

# For each field, words in the names of columns that hold it, the likeliest first.
NAMES = {
    "chosen": "chosen preferred better winner accepted best positive good win",
    "rejected": "rejected dispreferred worse loser refused worst negative bad lose",
    "response": "response answer reply completion output assistant solution target bot agent gpt a",
    "prompt": "prompt question instruction query input user human customer request problem task title q",
    "system": "system",
    "text": "text content document body article passage story page raw",
}
GROUPS = (("prompt", "chosen", "rejected"), ("prompt", "response"), ("text",))
KIND_OF = {"chosen": "preferences", "response": "conversations", "text": "text"}
ALIKE = 0.8
# The longest column is suggested as a document if its texts have at least so many characters on average.
DOCUMENT = 200


def suggested(samples: list[FileSample]) -> tuple[str, Fields] | None:
    """Return the kind and the `fields` by which rows could be read; None if no columns fit."""
    if column := _column_of_turns(samples):
        return "conversations", Fields(messages=column)
    texts = _text_columns(samples)
    for group in GROUPS:
        remaining = dict(texts)
        columns: dict[str, str] = {}
        # The prompt last, because its names are the least specific.
        for field in reversed(group):
            column = _nearest(remaining, NAMES[field].split())
            if column:
                columns[field] = column
                del remaining[column]
        if group == ("text",) and not columns and texts:
            longest = max(texts, key=texts.__getitem__)
            columns = {"text": longest} if texts[longest] >= DOCUMENT else {}
        if group == ("prompt", "response") and not columns and len(texts) == 2:
            # For instance column names in another language: the question is mostly first.
            columns = dict(zip(group, texts))
        if len(columns) == len(group):
            if group != ("text",) and (system := _nearest(remaining, ["system"])):
                columns["system"] = system
            order = {field: columns[field] for field in NAMES if field in columns}
            return KIND_OF[group[1] if len(group) > 1 else group[0]], Fields(**order)
    return None


def _column_of_turns(samples: list[FileSample]) -> str | None:
    """Return the first column that holds turns: lists of objects that name a speaker."""
    rows = (raw.value for sample in samples for raw in sample.raws if isinstance(raw.value, dict))
    return next((column for row in rows for column, value in row.items() if _are_turns(value)), None)


def _are_turns(value: Any) -> bool:
    return (
        isinstance(value, list)
        and all(isinstance(turn, dict) and any(turn.get(key) is not None for key in SPEAKER_KEYS) for turn in value)
        and len(value) > 1
    )


def _text_columns(samples: list[FileSample]) -> dict[str, float]:
    """Return the columns that hold texts in at least half of the rows, in order, with their average length."""
    lengths: dict[str, list[int]] = {}
    rows = [raw.value for sample in samples for raw in sample.raws if isinstance(raw.value, dict)]
    for row in rows:
        for column, value in row.items():
            if column and isinstance(value, str) and value.strip():
                lengths.setdefault(column, []).append(len(value))
    return {column: sum(values) / len(values) for column, values in lengths.items() if 2 * len(values) >= len(rows)}


def _nearest(columns: Iterable[str], names: list[str]) -> str | None:
    """Return the column whose name has a word of `names`, the likeliest first; else one with a similar name.

    >>> _nearest(["customer_question", "agentReply"], ["answer", "reply"])
    'agentReply'
    """
    words = {column: _words(column) for column in columns}
    for name in names:
        # The last word decides: `question_title` is a title, `title_of_question` is anything.
        for column, name_words in words.items():
            if name_words[-1:] == [name]:
                return column
        for column, name_words in words.items():
            if name in name_words:
                return column
    plain = {"".join(name_words): column for column, name_words in words.items()}
    alike = (match for name in names if len(name) > 3 for match in get_close_matches(name, plain, 1, ALIKE))
    return next((plain[match] for match in alike), None)


def _words(column: str) -> list[str]:
    separated = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", column)
    return [word.casefold() for word in re.findall(r"[^\W_]+", separated)]
