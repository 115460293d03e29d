"""Conversations encoded row by row to token ids and loss masks: the reference path.

`ChatTokenizer` renders and encodes a conversation and returns its assistant spans; the mask follows from these and from which
turns are wanted (see `turn_columns`):

                 user    assistant   user    assistant
    wanted        1          1        1          0
    supervised               x                               the wanted assistant turns
    supervised    x          x        x                      all wanted turns (`everything`)
"""

import numpy as np

from snaketune.tokenization.chat import ChatTokenizer, Encoded
from snaketune.tokenization.encoded_rows import EncodedBatch, concatenated
from snaketune.tokenization.template import Message, Refused
from snaketune.tokenization.tool_calls import texts_in
from snaketune.tokenization.turn_columns import Turns


def encode_turns(chat: ChatTokenizer, turns: Turns) -> EncodedBatch:
    """Encode all conversations.

    Raises:
        SnaketuneError: the template refuses a conversation; or some turns aren't supervised, and the template doesn't mark one
            block per assistant turn.
    """
    parts = []
    messages, tools = turns.messages(), turns.tools.to_pylist()
    wanted = np.split(turns.wanted, turns.offsets[1:-1])
    for number, (own, encoded) in enumerate(zip(messages, chat.encode(messages, tools=tools), strict=True)):
        turn_ends = chat.turn_ends(own, encoded.ids, tools[number])
        if turns.everything[number]:
            supervised = _all_turns_mask(wanted[number], encoded, turn_ends)
        else:
            supervised = _assistant_mask(own, wanted[number], encoded)
        ends_turn = np.zeros(len(encoded.ids), bool)
        ends_turn[turn_ends - 1] = True
        parts.append(EncodedBatch(encoded.ids, np.array([0, len(encoded.ids)]), supervised, ends_turn))
    return concatenated(parts)


def holds_control(chat: ChatTokenizer, turns: Turns) -> np.ndarray:
    """Return bool[n], whether a content or the tools of a row contain the string of a control token."""
    rows = zip(turns.messages(), turns.tools.to_pylist())
    texts = ([*(turn["content"] for turn in own), *texts_in(tools)] for own, tools in rows)
    return np.array([any(map(chat.control.written_in, own)) for own in texts], bool)


def _assistant_mask(messages: list[Message], wanted: np.ndarray, encoded: Encoded) -> np.ndarray:
    """Return bool, the tokens of the wanted assistant turns."""
    own = wanted[[message["role"] == "assistant" for message in messages]]
    if own.all():
        return encoded.supervised
    if len(encoded.spans) != len(own):
        raise Refused(
            "unmarked_turns",
            f"the chat template marks {len(encoded.spans)} generated blocks where the assistant has {len(own)} turns, so "
            "the supervised tokens aren't known; use a template with one {% generation %} block per assistant turn",
        )
    return encoded.mask([span for span, is_wanted in zip(encoded.spans, own) if is_wanted])


def _all_turns_mask(wanted: np.ndarray, encoded: Encoded, turn_ends: np.ndarray) -> np.ndarray:
    """Return bool, all tokens except those of unwanted turns, which reach from the end of the turn before to their own end."""
    supervised = np.ones(len(encoded.ids), bool)
    if wanted.all():
        return supervised
    if len(turn_ends) != len(wanted):
        raise Refused(
            "turns_without_ends",
            "some turns of a row have weight 0, and the chat template doesn't end every turn with a control token, so with "
            "train_on: all their tokens aren't known; use train_on: assistant, or a template that ends every turn",
        )
    for start, end, is_wanted in zip([0, *turn_ends[:-1]], turn_ends, wanted):
        supervised[start:end] &= is_wanted
    return supervised
