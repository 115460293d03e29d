"""Which columns may hold what, where no layout is known: `fields` by the names that columns have, as a suggestion."""

import re
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

from snaketune.config.corpus_sources import Fields
from snaketune.corpus.layouts.messages import SPEAKER_KEYS
from snaketune.preview.sample import Sample

# For each field the words by which columns are called that hold it, the likeliest first.
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
# Of a field's texts, at least so many characters on average, that the longest column is taken for a document.
DOCUMENT = 200


def suggested(samples: list[Sample]) -> tuple[str, Fields] | None:
    """The kind and the `fields` by which rows could be read; None where no columns come near."""
    if column := _column_of_turns(samples):
        return "conversations", Fields(messages=column)
    texts = _text_columns(samples)
    for group in GROUPS:
        left = dict(texts)
        found: dict[str, str] = {}
        # The prompt last, as its names are the widest.
        for field in reversed(group):
            column = _nearest(left, NAMES[field].split())
            if column:
                found[field] = column
                del left[column]
        if group == ("text",) and not found and texts:
            longest = max(texts, key=texts.__getitem__)
            found = {"text": longest} if texts[longest] >= DOCUMENT else {}
        if group == ("prompt", "response") and not found and len(texts) == 2:
            # In another language, say: what is asked mostly stands first.
            found = dict(zip(group, texts))
        if len(found) == len(group):
            if group != ("text",) and (system := _nearest(left, ["system"])):
                found["system"] = system
            order = {field: found[field] for field in NAMES if field in found}
            return KIND_OF[group[1] if len(group) > 1 else group[0]], Fields(**order)
    return None


def _column_of_turns(samples: list[Sample]) -> str | None:
    """The first column that holds turns, as lists of objects that name a speaker."""
    rows = (raw.value for sample in samples for raw in sample.raws if isinstance(raw.value, dict))
    return next((column for row in rows for column, value in row.items() if _are_turns(value)), None)


def _are_turns(value: Any) -> bool:
    return (
        isinstance(value, list)
        and all(isinstance(turn, dict) and any(turn.get(key) is not None for key in SPEAKER_KEYS) for turn in value)
        and len(value) > 1
    )


def _text_columns(samples: list[Sample]) -> dict[str, float]:
    """Columns that hold texts in at least half of the rows, in order, with how long these are on average."""
    lengths: dict[str, list[int]] = {}
    rows = [raw.value for sample in samples for raw in sample.raws if isinstance(raw.value, dict)]
    for row in rows:
        for column, value in row.items():
            if column and isinstance(value, str) and value.strip():
                lengths.setdefault(column, []).append(len(value))
    return {column: sum(own) / len(own) for column, own in lengths.items() if 2 * len(own) >= len(rows)}


def _nearest(columns: Iterable[str], names: list[str]) -> str | None:
    """The column whose name has a word of `names`, the likeliest first; else one that is spelled nearly so.

    >>> _nearest(["customer_question", "agentReply"], ["answer", "reply"])
    'agentReply'
    """
    words = {column: _words(column) for column in columns}
    for name in names:
        # The last word says what it is: `question_title` is a title, `title_of_question` is anything.
        for column, own in words.items():
            if own[-1:] == [name]:
                return column
        for column, own in words.items():
            if name in own:
                return column
    plain = {"".join(own): column for column, own in words.items()}
    alike = (match for name in names if len(name) > 3 for match in get_close_matches(name, plain, 1, ALIKE))
    return next((plain[match] for match in alike), None)


def _words(column: str) -> list[str]:
    apart = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", column)
    return [word.casefold() for word in re.findall(r"[^\W_]+", apart)]
