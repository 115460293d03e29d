"""A whole dialogue in one text, with a tag before each turn; recognised by its text, in a column of any name. With a `frame`,
the marks of a chat template are the tags.
"""

from collections.abc import Iterable

from snaketune.config.corpus_sources import Frame
from snaketune.corpus.rows import Conversation
from snaketune.corpus.values.dialogues import dialogue_turns, is_dialogue
from snaketune.corpus.values.frames import framed_exchange
from snaketune.corpus.values.row_file import RowFile
from snaketune.corpus.values.schema import Column, Samples, Schema, Values, Variant

# Beside these columns, a text that looks like a dialogue is part of the question.
PROMPTS = frozenset(
    ("instruction", "prompt", "question", "input", "query", "response", "output", "answer", "completion", "messages")
)


def _any(samples: Samples) -> Iterable[str]:
    return samples


def read(values: Values, file: RowFile) -> Conversation:
    frame = file.source.frame
    if isinstance(frame, Frame) and frame.after:
        return Conversation(messages=framed_exchange(values["messages"], file.names["messages"], frame))
    turns, notes = dialogue_turns(values["messages"], file.names["messages"], file.speakers)
    return Conversation(messages=turns, notes=notes)


SCHEMA = Schema("dialogue", read, Variant("messages", Column("messages", _any, holds=is_dialogue, unless=PROMPTS)))
