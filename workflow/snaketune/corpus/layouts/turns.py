"""A dialogue as `turns`: a list of {speaker, utterance}, where SYSTEM is the assistant if no other speaker is."""

from typing import Any

from snaketune.corpus.rows import Conversation
from snaketune.corpus.values.row_file import RowFile
from snaketune.corpus.values.schema import Column, Schema, Values, Variant
from snaketune.corpus.values.turns import turns_of


def _are_turns(value: Any) -> bool:
    # Else it is the number of turns.
    return isinstance(value, list | str)


def read(values: Values, file: RowFile) -> Conversation:
    turns = turns_of(values["messages"], file.names["messages"], file.speakers)
    if "system" not in file.speakers.values() and all(turn["role"] != "assistant" for turn in turns):
        turns = [turn | {"role": "assistant"} if turn["role"] == "system" else turn for turn in turns]
    return Conversation(messages=turns)


SCHEMA = Schema("turns", read, Variant("messages", Column("messages", "turns", holds=_are_turns)))
