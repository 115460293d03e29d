"""Conversations encoded row by row to token ids and loss masks: the reference path.

`ChatTokenizer` renders and encodes a conversation and returns its assistant spans; the mask follows from these and from which
turns are wanted (see `turn_columns`):

                 user    assistant   user    assistant
    wanted        1          1        1          0
    supervised               x                               the wanted assistant turns
    supervised    x          x        x                      all wanted turns (`everything`)
"""

from collections.abc import Sequence
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
    rows = list(zip(messages, wanted, tools, strict=True))
    if turns.rewritten:
        for number, (own, own_wanted, own_tools) in enumerate(rows):
            if changed := chat.template.rewritten(own, _trained_ends(own, own_wanted), own_tools):
                parts[number] = _rewritten(chat, *rows[number], changed, turns.rewritten)
    whole = [number for number in range(len(rows)) if number not in parts]
    for number, encoded in zip(whole, _encode(chat, [rows[number] for number in whole]), strict=True):
        own, own_wanted, _ = rows[number]
        if turns.rewritten and (changed := _apart_before_others(own, own_wanted, encoded)):
            parts[number] = _rewritten(chat, *rows[number], changed, turns.rewritten)
            continue
        if turns.everything[number]:
            supervised = _all_turns_mask(own_wanted, encoded)
        else:
            supervised = _assistant_mask(own, own_wanted, encoded)
        parts[number] = _one(encoded.ids, supervised, encoded.turn_ends)
    return concatenated([parts[number] for number in range(len(rows))])


def _encode(chat: ChatTokenizer, rows: Sequence[tuple[list[Message], np.ndarray, str | None]]) -> list[Encoded]:
    """Encode conversations, given with their wanted turns and their tools."""
    messages, wanted, tools = (list(column) for column in zip(*rows)) if rows else ([], [], [])
    return chat.encode(messages, tools=tools, trained=[own[_speaking(row)] > 0 for row, own in zip(messages, wanted)])


def _speaking(messages: list[Message]) -> np.ndarray:
    """Return bool, which turns are the assistant's."""
    return np.array([message["role"] == "assistant" for message in messages], bool)


def _trained_ends(messages: list[Message], wanted: np.ndarray) -> list[int]:
    """Return, for each wanted assistant turn, the number of turns up to it."""
    return (np.flatnonzero(_speaking(messages) & (wanted > 0)) + 1).tolist()


def _apart_before_others(messages: list[Message], wanted: np.ndarray, encoded: Encoded) -> list[int]:
    """Return the ends of turns that are encoded apart from their prompts and precede another wanted turn, in whose prompt they
    aren't."""
    ends = (np.flatnonzero(_speaking(messages)) + 1)[encoded.apart]
    return [end for end in ends.tolist() if end < _trained_ends(messages, wanted)[-1]]


def _rewritten(
    chat: ChatTokenizer,
    messages: list[Message],
    wanted: np.ndarray,
    tools: str | None,
    changed: list[int],
    treatment: str,
) -> EncodedBatch:
    """Encode a conversation in which wanted assistant turns, up to `changed`, are otherwise where others follow.

    `treatment` is that of `Turns.rewritten`.
    """
    if treatment == "last":
        kept = wanted.copy()
        kept[np.array(changed) - 1] = 0
        (encoded,) = _encode(chat, [(messages, kept, tools)])
        return _one(encoded.ids, _assistant_mask(messages, kept, encoded), encoded.turn_ends)
    ends, rows = _trained_ends(messages, wanted), []
    for end in ends:
        last = np.zeros(end, wanted.dtype)
        last[-1] = wanted[end - 1]
        rows.append((messages[:end], last, tools))
    encoded_views = _encode(chat, rows)
    views = [
        View(encoded.ids, _assistant_mask(own, last, encoded))
        for (own, last, _), encoded in zip(rows, encoded_views, strict=True)
    ]
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
    own = wanted[_speaking(messages)]
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
