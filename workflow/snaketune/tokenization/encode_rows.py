"""Conversations encoded row by row to token ids and loss masks: the reference path.

`ChatTokenizer` renders and encodes a conversation and returns its assistant spans; the mask follows from these and from which
turns are wanted (see `turn_columns`):

                 user    assistant   user    assistant
    wanted        1          1        1          0
    supervised               x                               the wanted assistant turns
    supervised    x          x        x                      all wanted turns (`everything`)

Qwen3 and other templates rewrite earlier turns: they write the reasoning of the last turn only. So the model sees another text
when it generates turn 1 than when it generates turn 2:

    view 1     Q1 <think>t1</think> A1                     turn 1 as it is generated
    view 2     Q1 A1 Q2 <think>t2</think> A2               turn 2

A view is the conversation up to a turn, as the template writes it, in which only that turn is supervised. Views are merged into
a tree, in which tokens that they begin with are stored and computed once:

    trunk      Q1 A1 Q2 <think>t2</think> A2
    branch       ` <think>t1</think> A1                    after the tokens of Q1

Losses and gradients are those of the views as samples of their own, at a cost that grows with the conversation rather than with
its square. Or the supervised turns are spliced into one sequence, in which turn 2 follows a turn 1 with reasoning: what peers
train, and what the model doesn't see when it is used.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from snaketune.engine.packing.ragged import common_start
from snaketune.tokenization.chat import ChatTokenizer, Encoded
from snaketune.tokenization.encoded_rows import EncodedBatch, concatenated
from snaketune.tokenization.template import Message, Refused
from snaketune.tokenization.tool_calls import texts_in
from snaketune.tokenization.turn_columns import Turns

# A branch: its first token in the sequence, how many tokens of its parent's sequence it continues, and the parent's number.
# Segment 0 is the trunk, segment i the i-th branch.
BRANCH_FIELDS = 3


@dataclass(frozen=True)
class View:
    """A conversation up to an assistant turn: its ids, int32[n], and bool[n], the tokens of that turn, or their weights."""

    ids: np.ndarray
    supervised: np.ndarray

    @property
    def end(self) -> int:
        """The end of the turn, in tokens; 0 if the template writes nothing of it.

        >>> View(np.array([1, 7, 2]), np.array([False, True, False])).end
        2
        """
        return int(np.append(0, np.flatnonzero(self.supervised) + 1)[-1])


def encode_turns(chat: ChatTokenizer, turns: Turns) -> EncodedBatch:
    """Encode all conversations, those with the same template variables together.

    Raises:
        SnaketuneError: the template refuses a conversation; or some turns aren't supervised, and the template doesn't mark one
            block per assistant turn.
    """
    rows_with: dict[str | None, list[int]] = {}
    for row, variables in enumerate(turns.variables.to_pylist()):
        rows_with.setdefault(variables, []).append(row)
    if rows_with.keys() <= {None}:
        return _encode_turns(chat, turns)
    rows = np.concatenate(list(rows_with.values()))
    parts = (
        _encode_turns(chat.with_variables(variables), turns.rows(np.array(of_variables)))
        for variables, of_variables in rows_with.items()
    )
    return concatenated(list(parts)).rows(np.argsort(rows))


def _encode_turns(chat: ChatTokenizer, turns: Turns) -> EncodedBatch:
    messages, tools = turns.messages(), turns.tools.to_pylist()
    # The part before the first offset is empty.
    _, *wanted = np.split(turns.wanted, turns.offsets[:-1])
    parts: dict[int, EncodedBatch] = {}
    rows = list(zip(messages, wanted, tools, strict=True))
    if turns.rewritten:
        for number, (conversation, own_wanted, own_tools) in enumerate(rows):
            if changed := chat.template.rewritten(conversation, _trained_ends(conversation, own_wanted), own_tools):
                parts[number] = _rewritten(chat, *rows[number], changed, turns.rewritten)
    whole = [number for number in range(len(rows)) if number not in parts]
    for number, encoded in zip(whole, _encode(chat, [rows[number] for number in whole]), strict=True):
        conversation, own_wanted, _ = rows[number]
        if turns.rewritten and (changed := _apart_before_others(conversation, own_wanted, encoded)):
            parts[number] = _rewritten(chat, *rows[number], changed, turns.rewritten)
            continue
        if turns.everything[number]:
            supervised = _all_turns_mask(own_wanted, encoded)
        else:
            supervised = _assistant_mask(conversation, own_wanted, encoded)
        parts[number] = _one(encoded.ids, supervised, encoded.turn_ends)
    return concatenated([parts[number] for number in range(len(rows))])


def _encode(chat: ChatTokenizer, rows: Sequence[tuple[list[Message], np.ndarray, str | None]]) -> list[Encoded]:
    """Encode conversations, given with their wanted turns and their tools."""
    messages, wanted, tools = (list(column) for column in zip(*rows)) if rows else ([], [], [])
    return chat.encode(
        messages, tools=tools, trained=[own_wanted[_speaking(row)] > 0 for row, own_wanted in zip(messages, wanted)]
    )


def _speaking(messages: list[Message]) -> np.ndarray:
    """bool, which turns are the assistant's."""
    return np.array([message["role"] == "assistant" for message in messages], bool)


def _trained_ends(messages: list[Message], wanted: np.ndarray) -> list[int]:
    """For each wanted assistant turn, the number of turns up to it."""
    return (np.flatnonzero(_speaking(messages) & (wanted > 0)) + 1).tolist()


def _apart_before_others(messages: list[Message], wanted: np.ndarray, encoded: Encoded) -> list[int]:
    """The ends of turns that are encoded apart from their prompts and precede another wanted turn, in whose prompt they
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
        View(encoded.ids, _assistant_mask(conversation, last, encoded))
        for (conversation, last, _), encoded in zip(rows, encoded_views, strict=True)
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
    """One conversation as a batch; `turn_ends` are the numbers of tokens up to the end of each turn."""
    ends_turn = np.zeros(len(ids), bool)
    ends_turn[turn_ends - 1] = True
    return EncodedBatch(ids, np.array([0, len(ids)]), supervised, ends_turn)


def merge_views(views: Sequence[View]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The tree of a conversation's views, given in the order of their turns; the last one is the trunk.

    Returns:
        The tokens of the trunk and of the branches, int32[n]; bool or float32[n]; the branches, int32[b, 3] of BRANCH_FIELDS.

    >>> views = [([1, 7, 2], [0, 1, 1]), ([1, 2, 3, 8, 2], [0, 0, 0, 1, 1])]
    >>> ids, supervised, branches = merge_views([View(np.array(own), np.array(mask, bool)) for own, mask in views])
    >>> ids.tolist(), branches.tolist()
    ([1, 2, 3, 8, 2, 7, 2], [[5, 1, 0]])
    >>> supervised.astype(int).tolist()
    [0, 0, 0, 1, 1, 1, 1]
    """
    parts: list[np.ndarray] = []
    # For each segment, the indices in the sequence of all tokens from the root to the segment's end.
    paths: list[np.ndarray] = []
    branches: list[tuple[int, int, int]] = []
    supervised: list[tuple[np.ndarray, np.ndarray]] = []
    total = 0
    for number, view in enumerate(reversed(views)):
        # What follows a turn in its view is written by the next turn, too, or never.
        ids = view.ids if number == 0 else view.ids[: view.end]
        shared, parent = max(
            ((common_start(ids, np.concatenate(parts)[path]), -at) for at, path in enumerate(paths)), default=(0, 0)
        )
        path = np.append(paths[-parent][:shared] if paths else [], np.arange(total, total + len(ids) - shared))
        path = path.astype(np.int64)
        if shared < len(ids):
            if paths:
                branches.append((total, shared, -parent))
            parts.append(ids[shared:])
            paths.append(path)
            total += len(ids) - shared
        tokens = np.flatnonzero(view.supervised[: len(ids)])
        supervised.append((path[tokens], view.supervised[tokens]))
    mask = np.zeros(total, np.result_type(*(view.supervised for view in views)))
    for tokens, weights in supervised:
        mask[tokens] = weights
    return np.concatenate(parts), mask, np.array(branches, np.int32).reshape(-1, BRANCH_FIELDS)


def splice_views(views: Sequence[View], continues: Sequence[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One sequence with every supervised turn as it is generated: ids, bool[n], and the ends of these turns.

    Args:
        continues: for each view, the first token after the turn of the view before, 0 for the first view.
    """
    ids, supervised, ends = [], [], []
    total = 0
    for number, (view, start) in enumerate(zip(views, continues, strict=True), 1):
        end = len(view.ids) if number == len(views) else view.end
        ids.append(view.ids[start:end])
        supervised.append(view.supervised[start:end])
        ends.append(total + view.end - start)
        total += end - start
    return np.concatenate(ids), np.concatenate(supervised), np.array(ends, np.int64)


def holds_control(chat: ChatTokenizer, turns: Turns) -> np.ndarray:
    """bool[n], whether a content or the tools of a row contain the string of a control token."""
    rows = zip(turns.messages(), turns.tools.to_pylist())
    texts = ([*(turn["content"] for turn in messages), *texts_in(tools)] for messages, tools in rows)
    return np.array([any(map(chat.control.written_in, row_texts)) for row_texts in texts], bool)


def _assistant_mask(messages: list[Message], wanted: np.ndarray, encoded: Encoded) -> np.ndarray:
    """The tokens of the wanted assistant turns, bool, or float32 if `wanted` has weights."""
    weights = wanted[_speaking(messages)]
    if (weights == 1).all():
        return encoded.supervised
    if len(encoded.spans) != len(weights):
        raise Refused(
            "unmarked_turns",
            f"the chat template marks {len(encoded.spans)} generated blocks where the assistant has {len(weights)} turns, so "
            "the supervised tokens aren't known; use a template with one {% generation %} block per assistant turn",
        )
    supervised = np.zeros(len(encoded.ids), wanted.dtype)
    for weight in np.unique(weights[weights > 0]):
        supervised[encoded.mask([span for span, of_span in zip(encoded.spans, weights) if of_span == weight])] = weight
    return supervised


def _all_turns_mask(wanted: np.ndarray, encoded: Encoded) -> np.ndarray:
    """The supervision of all tokens, bool or float32; a turn reaches from the end of the one before to its own end."""
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
