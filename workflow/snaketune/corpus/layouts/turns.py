"""A dialogue as `turns`: a list of {speaker, utterance}, where SYSTEM is the assistant."""

from typing import Any

from snaketune.corpus.rows import Conversation
from snaketune.corpus.values.roles import SYSTEM_ANSWERS
from snaketune.corpus.values.row_file import RowFile
from snaketune.corpus.values.schema import Column, Schema, Values, Variant
from snaketune.corpus.values.turns import turns_of


def _are_turns(value: Any) -> bool:
    # Else it is the number of turns.
    return isinstance(value, list | str)


def read(values: Values, file: RowFile) -> Conversation:
    return Conversation(messages=turns_of(values["messages"], file.names["messages"], SYSTEM_ANSWERS | file.speakers))


SCHEMA = Schema("turns", read, Variant("messages", Column("messages", "turns", holds=_are_turns)))
