"""Conversations encoded row by row to token ids and loss masks: the reference path.

`ChatTokenizer` renders and encodes a conversation and returns its assistant spans; the mask follows from these and from which
turns are wanted (see `turn_columns`):

                 user    assistant   user    assistant
    wanted        1          1        1          0
    supervised               x                               the wanted assistant turns
    supervised    x          x        x                      all wanted turns (`everything`)
"""

from dataclasses import replace

import numpy as np

from snaketune.tokenization.chat import ChatTokenizer, Encoded
from snaketune.tokenization.encoded_rows import EncodedBatch, concatenated
from snaketune.tokenization.template import Message, Refused
from snaketune.tokenization.tool_calls import texts_in
from snaketune.tokenization.turn_columns import Turns
from snaketune.tokenization.turn_trees import View, merge_views, splice_views


def encode_turns(chat: ChatTokenizer, turns: Turns) -> EncodedBatch:
    """Encode all conversations.

    Raises:
        SnaketuneError: the template refuses a conversation; or some turns aren't supervised, and the template doesn't mark one
            block per assistant turn.
    """
    messages, tools = turns.messages(), turns.tools.to_pylist()
    # The part before the first offset is empty.
    _, *wanted = np.split(turns.wanted, turns.offsets[:-1])
    parts: dict[int, EncodedBatch] = {}
    if turns.rewritten:
        for number, (own, own_wanted, own_tools) in enumerate(zip(messages, wanted, tools, strict=True)):
            if part := _rewritten(chat, own, own_wanted, own_tools, turns.rewritten):
                parts[number] = part
    whole = [number for number in range(len(messages)) if number not in parts]
    columns = ([column[number] for number in whole] for column in (messages, tools))
    for number, encoded in zip(whole, chat.encode(next(columns), tools=next(columns)), strict=True):
        if turns.everything[number]:
            supervised = _all_turns_mask(wanted[number], encoded)
        else:
            supervised = _assistant_mask(messages[number], wanted[number], encoded)
        parts[number] = _one(encoded.ids, supervised, encoded.turn_ends)
    return concatenated([parts[number] for number in range(len(messages))])


def _rewritten(
    chat: ChatTokenizer, messages: list[Message], wanted: np.ndarray, tools: str | None, treatment: str
) -> EncodedBatch | None:
    """Encode a conversation of which the template rewrites a wanted assistant turn; None if it doesn't.

    `treatment` is that of `Turns.rewritten`.
    """
    ends = [at for at, message in enumerate(messages, 1) if message["role"] == "assistant" and wanted[at - 1]]
    changed = chat.template.rewritten(messages, ends, tools)
    if not changed:
        return None
    if treatment == "last":
        (encoded,) = chat.encode([messages], tools=[tools])
        kept = wanted.copy()
        kept[np.array(changed) - 1] = 0
        return _one(encoded.ids, _assistant_mask(messages, kept, encoded), encoded.turn_ends)
    encoded_views = chat.encode([messages[:end] for end in ends], tools=[tools] * len(ends))
    views = []
    for end, encoded in zip(ends, encoded_views, strict=True):
        last = np.zeros(end, wanted.dtype)
        last[-1] = wanted[end - 1]
        views.append(View(encoded.ids, _assistant_mask(messages[:end], last, encoded)))
    if treatment == "all":
        continues = [0]
        for before, encoded in zip(ends, encoded_views[1:]):
            after = encoded.ends[before - 1]
            if after is None:
                raise Refused(
                    "turns_without_ends",
                    "the chat template rewrites an assistant turn where others follow, and ends it without a control token, "
                    "so the reasoning of all turns can't be written into one sequence; use corpora.NAME.reasoning: exact",
                )
            continues.append(after)
        return _one(*splice_views(views, continues))
    ids, supervised, branches = merge_views(views)
    return replace(_one(ids, supervised, np.zeros(0, np.int64)), branches=(branches,))


def _one(ids: np.ndarray, supervised: np.ndarray, turn_ends: np.ndarray) -> EncodedBatch:
    """Return one conversation as a batch; `turn_ends` are the numbers of tokens up to the end of each turn."""
    ends_turn = np.zeros(len(ids), bool)
    ends_turn[turn_ends - 1] = True
    return EncodedBatch(ids, np.array([0, len(ids)]), supervised, ends_turn)


def holds_control(chat: ChatTokenizer, turns: Turns) -> np.ndarray:
    """Return bool[n], whether a content or the tools of a row contain the string of a control token."""
    rows = zip(turns.messages(), turns.tools.to_pylist())
    texts = ([*(turn["content"] for turn in own), *texts_in(tools)] for own, tools in rows)
    return np.array([any(map(chat.control.written_in, own)) for own in texts], bool)


def _assistant_mask(messages: list[Message], wanted: np.ndarray, encoded: Encoded) -> np.ndarray:
    """Return the tokens of the wanted assistant turns, bool, or float32 if `wanted` has weights."""
    own = wanted[[message["role"] == "assistant" for message in messages]]
    if (own == 1).all():
        return encoded.supervised
    if len(encoded.spans) != len(own):
        raise Refused(
            "unmarked_turns",
            f"the chat template marks {len(encoded.spans)} generated blocks where the assistant has {len(own)} turns, so "
            "the supervised tokens aren't known; use a template with one {% generation %} block per assistant turn",
        )
    supervised = np.zeros(len(encoded.ids), wanted.dtype)
    for weight in np.unique(own[own > 0]):
        supervised[encoded.mask([span for span, of_span in zip(encoded.spans, own) if of_span == weight])] = weight
    return supervised


def _all_turns_mask(wanted: np.ndarray, encoded: Encoded) -> np.ndarray:
    """Return the supervision of all tokens, bool or float32; a turn reaches from the end of the one before to its own end."""
    supervised = np.ones(len(encoded.ids), wanted.dtype)
    if (wanted == 1).all():
        return supervised
    turn_ends = encoded.turn_ends
    if len(turn_ends) != len(wanted):
        raise Refused(
            "turns_without_ends",
            "some turns of a row have another weight than 1, and the chat template doesn't end every turn with a control "
            "token, so with train_on: all their tokens aren't known; use train_on: assistant, or a template that does",
        )
    for start, end, weight in zip([0, *turn_ends[:-1]], turn_ends, wanted):
        supervised[start:end] = weight
    return supervised
