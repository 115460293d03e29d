"""Conversations to tokens and the mask of those that are supervised, one by one: the ordinary path.

`ChatTokenizer` renders and encodes a conversation and knows what assistants say in it; here that becomes a mask, by which of
the turns are wanted (see `turns`):

                 user    assistant   user    assistant
    wanted        1          1        1          0
    supervised               x                               the assistant's wanted turns
    supervised    x          x        x                      all that is wanted (`everything`)
"""

import numpy as np

from snaketune.tokenization.chat import ChatTokenizer
from snaketune.tokenization.encoded_rows import Encoded, EncodedBatch, concatenated
from snaketune.tokenization.template import Message
from snaketune.tokenization.template_errors import Refused
from snaketune.tokenization.tools_argument import texts_in
from snaketune.tokenization.turn_columns import Turns


def encode_turns(chat: ChatTokenizer, turns: Turns) -> EncodedBatch:
    """Encode all.

    Raises:
        SnaketuneError: the template refuses a conversation, or marks other turns than the assistant's where some of
            them aren't supervised.
    """
    parts = []
    messages, tools = turns.messages(), turns.tools.to_pylist()
    bounds = turns.offsets.tolist()
    for number, (own, encoded) in enumerate(zip(messages, chat.encode(messages, tools=tools), strict=True)):
        turn_ends = chat.turn_ends(own, encoded.ids, tools[number])
        wanted = turns.wanted[bounds[number] : bounds[number + 1]]
        if turns.everything[number]:
            supervised = _everything(own, wanted, encoded, turn_ends)
        else:
            supervised = _of_assistants(own, wanted, encoded)
        ends_turn = np.zeros(len(encoded.ids), bool)
        ends_turn[turn_ends - 1] = True
        parts.append(EncodedBatch(encoded.ids, np.array([0, len(encoded.ids)]), supervised, ends_turn))
    return concatenated(parts)


def holds_control(chat: ChatTokenizer, turns: Turns) -> np.ndarray:
    """bool[n]: whether somebody wrote a control token."""
    written = chat.control.written_in
    return np.array(
        [
            any(written(turn["content"]) for turn in own) or any(map(written, texts_in(tools)))
            for own, tools in zip(turns.messages(), turns.tools.to_pylist())
        ],
        bool,
    )


def _of_assistants(messages: list[Message], wanted: np.ndarray, encoded: Encoded) -> np.ndarray:
    """bool: the tokens of the assistant's turns that are wanted."""
    own = wanted[[message["role"] == "assistant" for message in messages]]
    if own.all():
        return encoded.supervised
    if len(encoded.spans) != len(own):
        raise Refused(
            "unmarked_turns",
            f"the chat template marks {len(encoded.spans)} generated blocks where the assistant has {len(own)} turns, so "
            "it can't be told which of them are to be supervised; that needs a template with one "
            "{% generation %} block per assistant turn",
        )
    return encoded.mask([span for span, kept in zip(encoded.spans, own) if kept])


def _everything(messages: list[Message], wanted: np.ndarray, encoded: Encoded, turn_ends: np.ndarray) -> np.ndarray:
    """bool: all tokens but those of the turns that aren't wanted, from the end of the turn before to their own."""
    supervised = np.ones(len(encoded.ids), bool)
    if wanted.all():
        return supervised
    if len(turn_ends) != len(messages):
        raise Refused(
            "turns_without_ends",
            "some turns of a row have weight 0, and the chat template ends turns without control tokens of their own, so that "
            "with train_on: all it can't be told where they are; use train_on: assistant, or a template that ends every turn",
        )
    for start, end, kept in zip([0, *turn_ends[:-1]], turn_ends, wanted):
        supervised[start:end] &= kept
    return supervised
