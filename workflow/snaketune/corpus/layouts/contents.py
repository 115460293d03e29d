"""Gemini's `contents`: [{role, parts: [{text} or {functionCall} or {functionResponse}]}], with `systemInstruction`."""

from typing import Any

from snaketune.corpus.rows import Conversation
from snaketune.corpus.values.row_file import RowFile
from snaketune.corpus.values.schema import Column, Schema, Values, Variant
from snaketune.corpus.values.turns import turns_of
from snaketune.corpus.values.vendor_turns import messages_of_contents


def _has_parts(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(item, dict) and "parts" in item for item in value)


def read(values: Values, file: RowFile) -> Conversation:
    messages = messages_of_contents(values["messages"], values.get("instruction"))
    return Conversation(messages=turns_of(messages, "contents", file.speakers))


INSTRUCTION = Column("instruction", "systemInstruction system_instruction")
SCHEMA = Schema(
    "contents", read, Variant("messages", Column("messages", "contents", holds=_has_parts), INSTRUCTION), opaque=True
)
