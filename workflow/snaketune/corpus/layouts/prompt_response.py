"""A prompt and its response, each a text or turns: question and answer, Alpaca's instruction, input and output.

A response may also be only tool calls: query and answers (xlam), question and ground_truth (BFCL).
"""

from snaketune.corpus.rows import Conversation
from snaketune.corpus.values.responses import EXCHANGE, response_of
from snaketune.corpus.values.row_file import RowFile
from snaketune.corpus.values.schema import Schema, Values, Variant


def read(values: Values, file: RowFile) -> Conversation:
    prompt, response, notes = response_of(values, file)
    return Conversation(messages=prompt + response, notes=notes)


SCHEMA = Schema("prompt-response", read, Variant("prompt response", *EXCHANGE))
