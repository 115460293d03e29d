"""MOSS: `chat` is {turn_1: {Human, Inner Thoughts, Commands, Tool Responses, MOSS}, …}, with `meta_instruction`."""

import re
from typing import Any

from snaketune.corpus.rows import Conversation
from snaketune.corpus.values.cells import wrong_type
from snaketune.corpus.values.row_file import RowFile
from snaketune.corpus.values.schema import Column, Schema, Values, Variant
from snaketune.corpus.values.turns import turns_of
from snaketune.corpus.values.vendor_turns import sorted_by_number

# Around each text: a speaker tag, and an end tag.
FRAME = re.compile(r"\s*(?:<\|[\w ]+\|>:?\s?)?(.*?)(?:<eo[a-z]>)?\s*", re.DOTALL)


def read(values: Values, file: RowFile) -> Conversation:
    messages = _messages(values["messages"], values.get("instruction"))
    return Conversation(messages=turns_of(messages, file.names["messages"], file.speakers))


def _messages(chat: Any, system: Any) -> list[dict[str, Any]]:
    messages = [{"role": "system", "content": system}] if system else []
    for turn in sorted_by_number(chat):
        texts = {key: _text(value) for key, value in turn.items()} if isinstance(turn, dict) else {}
        if "Human" not in texts or "MOSS" not in texts:
            raise wrong_type("chat", turn, "Human and MOSS")
        messages.append({"role": "user", "content": texts["Human"]})
        if commands := texts.get("Commands"):
            messages.append({"role": "assistant", "content": commands, "reasoning": texts.get("Inner Thoughts")})
            messages.append({"role": "tool", "content": texts.get("Tool Responses", "")})
        messages.append({"role": "assistant", "content": texts["MOSS"]})
    return messages


def _text(value: Any) -> str:
    text = FRAME.fullmatch(value)[1] if isinstance(value, str) else ""
    return "" if text == "None" else text


CHAT = Column("messages", "chat", beside="meta_instruction")
SCHEMA = Schema("moss", read, Variant("messages", CHAT, Column("instruction", "meta_instruction")))
