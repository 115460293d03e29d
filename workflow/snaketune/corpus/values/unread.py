"""Columns and keys of a row that no reader used, so that none that holds something is ignored silently: 1 to 2 µs per row.

Columns are reported by name, keys of turns by their path: `messages[].name`, `messages[].content[].citations`.
"""

from collections.abc import Iterator
from typing import Any

from snaketune.corpus.values.cells import Raw, first_key, flat
from snaketune.corpus.values.content import CALL_KEYS, PART_KEYS
from snaketune.corpus.values.message_trees import MESSAGE_KEYS
from snaketune.corpus.values.row_file import Plan
from snaketune.corpus.values.turns import SPEAKER_KEYS, WEIGHT_KEYS, exchange_keys, keys_read
from snaketune.corpus.values.vendor_turns import ITEM_KEYS, is_item

INSTANCE_KEYS = {"input", "output", "response", "completion", "history", "context", "choices"}


def unread_names(raw: Raw, plan: Plan, *, opaque: bool = False) -> tuple[str, ...]:
    """The columns and keys of a row that hold something and weren't read, each once.

    Args:
        opaque: whether keys within columns that were read don't count.
    """
    if type(raw.get("input")) is dict:
        raw = flat(raw)
    names = []
    for column in plan.left:
        value = raw[column]
        # 0 and false hold something; null, an empty text, list or object don't.
        if value or isinstance(value, (int, float)):
            names.append(column)
    if not opaque:
        for _, column in plan.simple:
            value = raw[column]
            for item in value if type(value) is list else [value] if type(value) is dict else ():
                # Nearly all turns have only a role and a text.
                if (
                    type(item) is not dict
                    or len(item) != 2
                    or type(item.get("content") or item.get("value")) is not str
                ):
                    names += dict.fromkeys(_unread_within(value, column))
                    break
    return tuple(names)


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
