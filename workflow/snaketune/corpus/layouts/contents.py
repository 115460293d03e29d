"""Gemini's `contents`: [{role, parts: [{text} or {functionCall} or {functionResponse}]}], with `systemInstruction`."""

import json
from typing import Any

from snaketune.corpus.rows import Conversation, Malformed
from snaketune.corpus.values.cells import wrong_type
from snaketune.corpus.values.row_file import RowFile
from snaketune.corpus.values.schema import Column, Schema, Values, Variant
from snaketune.corpus.values.turns import turns_of


def _has_parts(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(item, dict) and "parts" in item for item in value)


def read(values: Values, file: RowFile) -> Conversation:
    messages = _messages(values["messages"], values.get("instruction"))
    return Conversation(messages=turns_of(messages, "contents", file.speakers))


def _messages(contents: Any, system: Any) -> list[dict[str, Any]]:
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


INSTRUCTION = Column("instruction", "systemInstruction system_instruction")
SCHEMA = Schema(
    "contents", read, Variant("messages", Column("messages", "contents", holds=_has_parts), INSTRUCTION), opaque=True
)
