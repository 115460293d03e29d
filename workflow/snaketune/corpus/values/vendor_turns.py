"""Lists of messages in other spellings.

blocks      Anthropic: tool results as parts of a user message, [{type: tool_result, tool_use_id, content}]
field       what `fields.messages` may name: alternating texts, or turns with a number each
"""

import re
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

from snaketune.corpus.rows import Malformed
from snaketune.corpus.values.cells import kind_of

# The id of a tool result.
RESULT_KEY = "tool_call_id"
NUMBER_KEYS = ("turn", "turn_id", "turn_idx", "turn_number", "index", "idx", "number", "position")
NUMBER = re.compile(r"\D*(\d+)")


def has_tool_results(item: Any) -> bool:
    """Return True if a user message has tool results among its parts."""
    content = item.get("content") if isinstance(item, dict) and item.get("role") != "tool" else None
    return isinstance(content, list) and any(map(_is_tool_result, content))


def split_tool_results(items: Sequence[Any]) -> list[Any]:
    """Return messages in which each tool result is a message of its own, before the rest of the user message."""
    messages: list[Any] = []
    for item in items:
        if not has_tool_results(item):
            messages.append(item)
            continue
        for part in filter(_is_tool_result, item["content"]):
            result = {RESULT_KEY: part.get("tool_use_id"), "content": part.get("content") or ""}
            messages.append({"role": "tool"} | result)
        if others := [part for part in item["content"] if not _is_tool_result(part)]:
            messages.append(item | {"content": others})
    return messages


def _is_tool_result(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "tool_result"


def messages_of_field(value: Any) -> Any:
    """Return alternating texts, or numbered turns, as messages; anything else unchanged."""
    items = sorted_by_number(value) if isinstance(value, dict) else value
    if not isinstance(items, list) or not items:
        return value
    if all(isinstance(item, str) for item in items):
        return [{"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(items)]
    if not all(isinstance(item, dict) for item in items):
        return items
    # `type`, because a boolean is no number.
    key = next((key for key in NUMBER_KEYS if all(type(item.get(key)) is int for item in items)), None)
    if key is None:
        return items
    ordered = sorted(items, key=itemgetter(key))
    return [{name: part for name, part in item.items() if name != key} for item in ordered]


def sorted_by_number(turns: Any) -> list[Any]:
    """Return the values of an object whose keys are numbered, in order. Raises Malformed if they aren't numbered."""
    numbers = [NUMBER.fullmatch(key) for key in turns] if isinstance(turns, dict) else []
    if not numbers or None in numbers:
        raise Malformed("wrong_type", f"found {kind_of(turns)}, expected an object of numbered turns: turn_1, turn_2")
    return [turn for _, turn in sorted(zip((int(n[1]) for n in numbers), turns.values()), key=itemgetter(0))]
