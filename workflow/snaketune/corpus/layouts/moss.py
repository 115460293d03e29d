"""MOSS: `chat` is {turn_1: {Human, Inner Thoughts, Commands, Tool Responses, MOSS}, …}, with `meta_instruction`."""

from snaketune.corpus.rows import Conversation
from snaketune.corpus.values.row_file import RowFile
from snaketune.corpus.values.schema import Column, Schema, Values, Variant
from snaketune.corpus.values.turns import turns_of
from snaketune.corpus.values.vendor_turns import messages_of_moss


def read(values: Values, file: RowFile) -> Conversation:
    messages = messages_of_moss(values["messages"], values.get("instruction"))
    return Conversation(messages=turns_of(messages, file.names["messages"], file.speakers))


CHAT = Column("messages", "chat", beside="meta_instruction")
SCHEMA = Schema("moss", read, Variant("messages", CHAT, Column("instruction", "meta_instruction")))
