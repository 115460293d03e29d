"""Columns and keys of a row that no reader used, so that none that holds something is ignored silently: 1 to 2 µs per row.

Columns are reported by name, keys of turns by their path: `messages[].name`, `messages[].content[].citations`.
"""

import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any

from snaketune.corpus.layouts.content import CALL_KEYS, PART_KEYS
from snaketune.corpus.layouts.message_trees import MESSAGE_KEYS
from snaketune.corpus.layouts.messages import SPEAKER_KEYS, WEIGHT_KEYS, exchange_keys, keys_read
from snaketune.corpus.layouts.prompt_columns import COLUMNS
from snaketune.corpus.layouts.values import Columns, Raw, first_key, plain_text
from snaketune.corpus.layouts.vendor_turns import GEMINI_COLUMNS, ITEM_KEYS, is_item

INSTANCE_KEYS = {"instruction", "input", "output", "response", "completion", "history", *COLUMNS}
GOOD = "correct|safe|valid|verified|helpful|harmless|good|passed|approved|appropriate|successful|success|pass|resolved"
BAD = "incorrect|wrong|unsafe|toxic|harmful|invalid|bad|spam|flagged|hallucinations?|hallucinated"
MARKS = re.compile(rf"(?:is_)?(?:{GOOD}|{BAD})|labels?", re.IGNORECASE)
RATINGS = "helpfulness|correctness|truthfulness|honesty|harmlessness|quality|safety|score|rating|reward"
# The values of such columns in bad rows.
BAD_VALUES = {
    re.compile(rf"(?:is_)?(?:{GOOD})", re.IGNORECASE): {"false", "no", "0", "fail", "failed"},
    re.compile(rf"(?:is_)?(?:{BAD})", re.IGNORECASE): {"true", "yes", "1"},
    re.compile(RATINGS, re.IGNORECASE): {"0"},
}


def unread_names(raw: Columns, layout: str, mapped_names: frozenset[str]) -> tuple[str, ...]:
    """Return the columns and keys of a row that hold something and weren't read, each once.

    Args:
        mapped_names: columns that the config's `fields` name.
    """
    others, read = _columns(tuple(raw), tuple(raw.read), layout, mapped_names)
    names = [column for column in others if _has_content(raw.get(column))]
    for column in read:
        value = raw.get(column)
        if type(value) is dict or (type(value) is list and not _is_plain(value)):
            names += dict.fromkeys(_unread_within(value, column))
    return tuple(names)


def _is_plain(turns: list[Any]) -> bool:
    """Return True if all turns have only a role and a text, as nearly all have."""
    for turn in turns:
        if type(turn) is not dict or len(turn) != 2 or type(turn.get("content") or turn.get("value")) is not str:
            return False
    return True


@lru_cache(maxsize=4096)
def _columns(
    columns: tuple[str, ...], read: tuple[str, ...], layout: str, mapped_names: frozenset[str]
) -> tuple[list[str], list[str]]:
    """Return the columns that weren't read, and those that were and may have unread keys."""
    known = {*read, *mapped_names, *(MESSAGE_KEYS if layout == "message-tree" else ())}
    others = [column for column in columns if column not in known]
    return others, [column for column in columns if column in known - GEMINI_COLUMNS]


def _unread_within(value: list[Any] | Raw, where: str) -> Iterator[str]:
    """Yield the keys that aren't read of the turns, instances or replies in a column that is read."""
    items, where = ([value], f"{where}.") if type(value) is dict else (value, f"{where}[].")
    for item in items:
        if type(item) is not dict:
            continue
        if "replies" in item or "message_id" in item:
            yield from _unread_of_message(item, where)
        elif where == "instances[].":
            yield from _unread_keys(item, INSTANCE_KEYS, where)
        elif pair_keys := exchange_keys(item):
            yield from _unread_keys(item, {*pair_keys, "system", *WEIGHT_KEYS}, where)
        elif is_item(item) and not item.get("role"):
            yield from _unread_keys(item, ITEM_KEYS, where)
        elif first_key(item, SPEAKER_KEYS):
            yield from _unread_of_turn(item, where)


def _unread_keys(item: Raw, known: set[Any], where: str) -> Iterator[str]:
    return (where + key for key in item if key not in known and _has_content(item[key]))


def _unread_of_turn(turn: Raw, where: str) -> Iterator[str]:
    read = keys_read(turn)
    for key, value in turn.items():
        if key not in read:
            yield from _unread_keys({key: value}, read, where)
        elif type(value) is list:
            known = CALL_KEYS if key == "tool_calls" else PART_KEYS
            for part in value:
                if type(part) is dict:
                    yield from _unread_keys(part, known, f"{where}{key}[].")


def _unread_of_message(root: Raw, where: str) -> Iterator[str]:
    pending = [root]
    while pending:
        message = pending.pop()
        yield from _unread_keys(message, MESSAGE_KEYS, where)
        replies = message.get("replies")
        pending += [reply for reply in replies if type(reply) is dict] if type(replies) is list else []


def _has_content(value: Any) -> bool:
    """Return True if a value holds something: 0 and false do; null, an empty text, list or object don't."""
    return bool(value) or isinstance(value, (int, float))


def bad_row_marks(raw: Raw, unread: Iterable[str]) -> tuple[str, ...]:
    """Return the unread columns that mark the row as bad, with their values.

    >>> bad_row_marks({"is_correct": False, "helpfulness": 0.0, "id": 0}, ("is_correct", "helpfulness", "id"))
    ('is_correct: false', 'helpfulness: 0')
    """
    texts = ((name, plain_text(raw.get(name)) or "") for name in unread if _bad_values(name))
    return tuple(
        f"{name}: {text}" for name, text in texts if text.strip().lower().removesuffix(".0") in _bad_values(name)
    )


@lru_cache(maxsize=4096)
def marks_rows(path: str) -> bool:
    """Whether a column's name says that its values tell good rows from bad ones: `is_correct`, `label`."""
    return any(map(MARKS.fullmatch, path.split(".")))


@lru_cache(maxsize=4096)
def _bad_values(name: str) -> frozenset[str]:
    return frozenset().union(*(values for names, values in BAD_VALUES.items() if names.fullmatch(name)))
