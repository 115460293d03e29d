"""A conversation as a list of messages: {role, content}, {from, value}, or {human, assistant} for two turns at once."""

from typing import Any

from snaketune.corpus.rows import Conversation
from snaketune.corpus.values.cells import wrong_type
from snaketune.corpus.values.row_file import RowFile
from snaketune.corpus.values.schema import Column, Schema, Values, Variant
from snaketune.corpus.values.turns import may_be_serialized_turns, turns_of


def _may_be_turns(value: Any) -> bool:
    return not isinstance(value, str) or may_be_serialized_turns(value)


def read(values: Values, file: RowFile) -> Conversation:
    messages, name = values["messages"], file.names["messages"]
    if isinstance(messages, list) and messages and isinstance(messages[0], str):
        what = "an object with speaker and content; texts of alternating speakers are read as `fields.messages`"
        raise wrong_type(f"{name}, turn 1", messages[0], what)
    return Conversation(messages=turns_of(messages, name, file.speakers))


SCHEMA = Schema(
    "messages",
    read,
    Variant(
        "messages",
        Column("messages", "messages conversations"),
        Column("messages", "conversation", holds=_may_be_turns),
    ),
)
