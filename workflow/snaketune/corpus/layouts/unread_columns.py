"""Columns and keys of a row that no reader used, so that none that holds something is ignored silently.

`Columns` records which columns are read. Other columns that hold something are reported by name, and keys of turns by their
path: `messages[].name`, `messages[].content[].citations`. Takes 1 to 2 µs per row.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from snaketune.corpus.layouts.columns import Columns
from snaketune.corpus.layouts.content_parts import CALL_KEYS, PART_KEYS
from snaketune.corpus.layouts.context_columns import COLUMNS
from snaketune.corpus.layouts.loss_flags import KEYS as WEIGHT_KEYS
from snaketune.corpus.layouts.message_trees import MESSAGE_KEYS
from snaketune.corpus.layouts.messages import SPEAKER_KEYS, exchange_keys, keys_read
from snaketune.corpus.layouts.vendor_turns import GEMINI_COLUMNS

INSTANCE_KEYS = {"instruction", "input", "output", "response", "completion", "history", *COLUMNS}


def unread_names(raw: Columns, layout: str, mapped_names: frozenset[str]) -> tuple[str, ...]:
    """Return the columns and keys of a row that hold something and weren't read, each once.

    Args:
        raw: the row, after it was read.
        mapped_names: columns that the config's `fields` name.
    """
    others, read = _columns(tuple(raw), tuple(raw.read), layout, mapped_names)
    names = [column for column in others if _has_content(raw.get(column))] if others else []
    for column in read:
        if column in GEMINI_COLUMNS:
            continue
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
    """Return the columns that weren't read, and those that were."""
    known = {*read, *mapped_names, *(MESSAGE_KEYS if layout == "message-tree" else ())}
    return [column for column in columns if column not in known], [column for column in columns if column in known]


def _unread_within(value: list[Any] | dict[str, Any], where: str) -> Iterator[str]:
    """Yield the keys that aren't read of the turns, instances or replies in a column that is read."""
    if type(value) is dict:
        items, where = [value], f"{where}."
    else:
        items, where = value, f"{where}[]."
    for item in items:
        if type(item) is not dict:
            continue
        if "replies" in item or "message_id" in item:
            yield from _unread_of_message(item, where)
        elif where == "instances[].":
            yield from (where + key for key in item if key not in INSTANCE_KEYS and _has_content(item[key]))
        elif pair_keys := exchange_keys(item):
            yield from (
                where + key
                for key in item
                if key not in (*pair_keys, "system", *WEIGHT_KEYS) and _has_content(item[key])
            )
        elif any(item.get(key) is not None for key in SPEAKER_KEYS):
            yield from _unread_of_turn(item, where)


def _unread_of_turn(turn: dict[str, Any], where: str) -> Iterator[str]:
    read = keys_read(turn)
    for key, value in turn.items():
        if key not in read:
            if _has_content(value):
                yield where + key
        elif type(value) is list:
            known = CALL_KEYS if key == "tool_calls" else PART_KEYS
            for part in value:
                if type(part) is dict:
                    yield from (f"{where}{key}[].{k}" for k in part if k not in known and _has_content(part[k]))


def _unread_of_message(root: dict[str, Any], where: str) -> Iterator[str]:
    pending = [root]
    while pending:
        message = pending.pop()
        yield from (where + key for key, value in message.items() if key not in MESSAGE_KEYS and _has_content(value))
        replies = message.get("replies")
        pending += [reply for reply in replies if type(reply) is dict] if type(replies) is list else []


def _has_content(value: Any) -> bool:
    """Return True if a value holds something: 0 and false do; null, an empty text, list or object don't."""
    return bool(value) or (value is not None and isinstance(value, (int, float)))
