"""Conversations in the formats of other APIs, as lists of messages.

contents    Gemini: [{role, parts: [{text} or {functionCall} or {functionResponse}]}], with systemInstruction
moss        chat: {turn_1: {Human, Inner Thoughts, Commands, Tool Responses, MOSS}, …}, with meta_instruction
blocks      Anthropic: tool results as parts of a user message, [{type: tool_result, tool_use_id, content}]
field       what `fields.messages` may name: alternating texts, or turns with a number each
"""

import json
import re
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

from snaketune.corpus.rows import Malformed
from snaketune.corpus.values.cells import kind_of, wrong_type

# The id of a tool result.
RESULT_KEY = "tool_call_id"
SYSTEM_KEYS = ("systemInstruction", "system_instruction")
GEMINI_COLUMNS = {"contents", *SYSTEM_KEYS}
# Around each text of MOSS: a speaker tag, and an end tag.
MOSS_FRAME = re.compile(r"\s*(?:<\|[\w ]+\|>:?\s?)?(.*?)(?:<eo[a-z]>)?\s*", re.DOTALL)
NUMBER_KEYS = ("turn", "turn_id", "turn_idx", "turn_number", "index", "idx", "number", "position")
NUMBER = re.compile(r"\D*(\d+)")


def is_contents(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(item, dict) and "parts" in item for item in value)


def messages_of_contents(contents: Any, system: Any) -> list[dict[str, Any]]:
    messages = [{"role": "system", "content": _text_of_parts(system)}] if system else []
    for item in contents if isinstance(contents, list) else [contents]:
        parts = item.get("parts") if isinstance(item, dict) else None
        if not isinstance(parts, list):
            raise wrong_type("contents", item, "a role and parts")
        objects = [part for part in parts if isinstance(part, dict)]
        if results := [part["functionResponse"] for part in objects if "functionResponse" in part]:
            responses = [result.get("response") for result in results]
            texts = [value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for value in responses]
            messages += ({"role": "tool", "content": text} for text in texts)
            # A text beside results would be a turn of its own; rows can't have one there, and are refused.
            parts = [part for part in parts if not (isinstance(part, dict) and "functionResponse" in part)]
            if not parts:
                continue
            objects = [part for part in parts if isinstance(part, dict)]
        thoughts = [part for part in objects if part.get("thought") and isinstance(part.get("text"), str)]
        answer = [part for part in parts if part not in thoughts]
        calls = [part["functionCall"] for part in answer if isinstance(part, dict) and "functionCall" in part]
        message = {"role": item.get("role", "user"), "content": _text_of_parts(answer)}
        if reasoning := "".join(part["text"] for part in thoughts):
            message["reasoning"] = reasoning
        if calls:
            message["tool_calls"] = [
                {"name": call.get("name"), "arguments": call.get("args") or {}} if isinstance(call, dict) else call
                for call in calls
            ]
        messages.append(message)
    return messages


def _text_of_parts(parts: Any) -> str:
    if isinstance(parts, dict):
        parts = parts.get("parts", parts)
    if isinstance(parts, str):
        return parts
    parts = parts if isinstance(parts, list) else [parts]
    without_calls = [part for part in parts if not (isinstance(part, dict) and "functionCall" in part)]
    texts = [part.get("text") if isinstance(part, dict) else part for part in without_calls]
    if not all(isinstance(text, str) for text in texts):
        kinds = ", ".join(sorted({key for part in parts if isinstance(part, dict) for key in part if key != "text"}))
        raise Malformed("unsupported_part", f"contents has a part ({kinds[:80]}) that text can't represent")
    return "".join(texts)


def messages_of_moss(chat: Any, system: Any) -> list[dict[str, Any]]:
    messages = [{"role": "system", "content": system}] if system else []
    for turn in _sorted_by_number(chat):
        texts = {key: _moss_text(value) for key, value in turn.items()} if isinstance(turn, dict) else {}
        if "Human" not in texts or "MOSS" not in texts:
            raise wrong_type("chat", turn, "Human and MOSS")
        messages.append({"role": "user", "content": texts["Human"]})
        if commands := texts.get("Commands"):
            messages.append({"role": "assistant", "content": commands, "reasoning": texts.get("Inner Thoughts")})
            messages.append({"role": "tool", "content": texts.get("Tool Responses", "")})
        messages.append({"role": "assistant", "content": texts["MOSS"]})
    return messages


def _moss_text(value: Any) -> str:
    text = MOSS_FRAME.fullmatch(value)[1] if isinstance(value, str) else ""
    return "" if text == "None" else text


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
    items = _sorted_by_number(value) if isinstance(value, dict) else value
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


def _sorted_by_number(turns: Any) -> list[Any]:
    """Return the values of an object whose keys are numbered, in order. Raises Malformed if they aren't numbered."""
    numbers = [NUMBER.fullmatch(key) for key in turns] if isinstance(turns, dict) else []
    if not numbers or None in numbers:
        raise Malformed("wrong_type", f"found {kind_of(turns)}, expected an object of numbered turns: turn_1, turn_2")
    return [turn for _, turn in sorted(zip((int(n[1]) for n in numbers), turns.values()), key=itemgetter(0))]
