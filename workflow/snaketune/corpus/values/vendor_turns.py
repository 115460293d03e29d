"""Lists of messages in other spellings.

items       Responses API: {type: reasoning, summary}, {type: function_call, name, arguments, call_id}, {type:
            function_call_output, call_id, output}; Harmony: {role, content, channel, recipient}
blocks      Anthropic: tool results as parts of a user message, [{type: tool_result, tool_use_id, content}]
field       what `fields.messages` may name: alternating texts, or turns with a number each
"""

import re
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

from snaketune.corpus.rows import Malformed
from snaketune.corpus.values.cells import kind_of, wrong_type
from snaketune.corpus.values.content import text_of

# The id of a tool result.
RESULT_KEY = "tool_call_id"
# Items without a role; channels of Harmony's messages, and the beginning of the recipients of calls.
ITEM_TYPES = ("reasoning", "function_call", "function_call_output")
CHANNELS = ("analysis", "commentary", "final")
FUNCTIONS = "functions."
READ_KEYS = {"type", "channel", "recipient"}
ITEM_KEYS = READ_KEYS | {"id", "call_id", "status", "role", "content", "summary", "name", "arguments", "output"}
NUMBER_KEYS = ("turn", "turn_id", "turn_idx", "turn_number", "index", "idx", "number", "position")
NUMBER = re.compile(r"\D*(\d+)")


def is_item(item: Any) -> bool:
    """Return True if an entry of a list of messages is an item of the Responses API without a speaker, or has a channel."""
    if not isinstance(item, dict):
        return False
    return item.get("channel") in CHANNELS or (item.get("type") in ITEM_TYPES and not item.get("role"))


def messages_of_items(items: Sequence[Any]) -> list[Any]:
    """Return items as messages: reasoning with the answer or the calls that follow it, calls of one response together.

    >>> messages_of_items([{"role": "assistant", "channel": "analysis", "content": "Greet."},
    ...                    {"role": "assistant", "channel": "final", "content": "Hi"}])
    [{'role': 'assistant', 'content': 'Hi', 'reasoning': 'Greet.'}]
    """
    messages: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for number, item in enumerate([*items, {}], start=1):
        if not isinstance(item, dict):
            raise wrong_type(f"item {number}", item, "an object")
        kind, recipient = item.get("type"), item.get("recipient") or ""
        if kind == "reasoning" or item.get("channel") == "analysis":
            thoughts.append(text_of(item.get("summary") or item.get("content") or "", f"item {number}"))
            continue
        if kind == "function_call":
            call = {"id": item.get("call_id"), "name": item.get("name"), "arguments": item.get("arguments")}
            item = {"role": "assistant", "content": "", "tool_calls": [call]}
        elif kind == "function_call_output":
            item = {"role": "tool", RESULT_KEY: item.get("call_id"), "content": item.get("output")}
        elif recipient.startswith(FUNCTIONS):
            call = {"name": recipient.removeprefix(FUNCTIONS), "arguments": item.get("content")}
            item = {"role": "assistant", "content": "", "tool_calls": [call]}
        answers = item.get("role") == "assistant"
        if thoughts and not answers:
            raise Malformed(
                "reasoning_without_answer", f"no answer and no call follows the reasoning before item {number}"
            )
        if thoughts:
            item, thoughts = item | {"reasoning": "\n\n".join(filter(None, thoughts))}, []
        elif answers and "tool_calls" in item and messages and messages[-1].get("role") == "assistant":
            messages[-1]["tool_calls"] = [*messages[-1].get("tool_calls", ()), *item["tool_calls"]]
            continue
        messages.append({key: value for key, value in item.items() if key not in READ_KEYS})
    return messages[:-1]


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
