"""Conversations and pairs to tokens, by either of two ways that give the same.

`Slow` is `ChatTokenizer`, row by row. `Fast` handles a batch at once: it lays literals and contents out as one run of bytes
(see `frames`), encodes that chunk by chunk (see `chunks`), and finds what is learned from where the literals are. Rows for
which that proves nothing go the slow way: a content that holds an added token's string, is empty, or where whitespace at
its ends matters; roles that the template treats in a way of their own; and prompts that offer tools.
"""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from snaketune.errors import SnaketuneError
from snaketune.tokenization.batched.chunks import Chunks, Encoded
from snaketune.tokenization.batched.frames import Frame, Frames
from snaketune.tokenization.batched.separable import SPACE, NotSeparable, separable
from snaketune.tokenization.batched.verbatim import NotVerbatim, check_verbatim
from snaketune.tokenization.chat import ChatTokenizer, Rendered
from snaketune.tokenization.encoded import Sequences, concatenated
from snaketune.tokenization.offered import texts_in
from snaketune.tokenization.ragged import gather, offsets_of
from snaketune.tokenization.template import Message
from snaketune.tokenization.turns import Turns

# What Python's strip() takes off, as a template's trim does.
STRIPPED = "".join(character for code in range(0x3001) if (character := chr(code)).isspace())


class Slow:
    """The reference, row by row."""

    def __init__(self, chat: ChatTokenizer):
        self._chat = chat

    def encode(self, turns: Turns) -> Sequences:
        """Encode all.

        Raises:
            SnaketuneError: the template refuses a conversation, or marks other turns than the assistant's where some of
                them aren't learned.
        """
        parts = [_nothing()]
        messages, tools = turns.messages(), turns.tools.to_pylist()
        bounds = turns.offsets.tolist()
        rendered = self._chat.render(messages, tools=tools)
        for number, (own, done) in enumerate(zip(messages, rendered, strict=True)):
            turn_ends = self._chat.turn_ends(own, done.ids, tools[number])
            wanted = turns.wanted[bounds[number] : bounds[number + 1]]
            if turns.everything[number]:
                learned = _everything(own, wanted, done, turn_ends)
            else:
                learned = _of_assistants(own, wanted, done)
            ends = np.zeros(len(done.ids), bool)
            ends[turn_ends - 1] = True
            parts.append(Sequences(done.ids, np.array([0, len(done.ids)]), learned, ends))
        return concatenated(parts)

    def holds_control(self, turns: Turns) -> np.ndarray:
        """bool[n]: whether somebody wrote a control token."""
        written = self._chat.control.written_in
        return np.array(
            [
                any(written(turn["content"]) for turn in own) or any(map(written, texts_in(tools)))
                for own, tools in zip(turns.messages(), turns.tools.to_pylist())
            ],
            bool,
        )


def _of_assistants(messages: list[Message], wanted: np.ndarray, done: Rendered) -> np.ndarray:
    """bool: the tokens of the assistant's turns that are wanted."""
    own = wanted[[message["role"] == "assistant" for message in messages]]
    if own.all():
        return done.supervised(done.spans)
    if len(done.spans) != len(own):
        raise SnaketuneError(
            f"the chat template marks {len(done.spans)} generated blocks where the assistant has {len(own)} turns, so "
            "it can't be told which of them are to be learned; that needs a template with one "
            "{% generation %} block per assistant turn"
        )
    return done.supervised([span for span, learned in zip(done.spans, own) if learned])


def _everything(messages: list[Message], wanted: np.ndarray, done: Rendered, turn_ends: np.ndarray) -> np.ndarray:
    """bool: all tokens but those of the turns that aren't wanted, from the end of the turn before to their own."""
    learned = np.ones(len(done.ids), bool)
    if wanted.all():
        return learned
    if len(turn_ends) != len(messages):
        raise SnaketuneError(
            "some turns of a row have weight 0, and the chat template ends turns without control tokens of their own, so that "
            "with train_on: all it can't be told where they are; use train_on: assistant, or a template that ends every turn"
        )
    for start, end, kept in zip([0, *turn_ends[:-1]], turn_ends, wanted):
        learned[start:end] &= kept
    return learned


def _nothing() -> Sequences:
    return Sequences(np.zeros(0, np.int32), np.zeros(1, np.int64), np.zeros(0, bool), np.zeros(0, bool))


class Fast:
    """A whole batch at once.

    Raises:
        NotSeparable, NotVerbatim: of this tokenizer or template, nothing is proved; the message says why.
    """

    def __init__(self, chat: ChatTokenizer):
        check_verbatim(chat.template)
        self._separable = separable(chat.description)
        self._slow = Slow(chat)
        self._chunks = Chunks(self._separable)
        self._frames = Frames(chat, self._separable, self._chunks)

    def encode(self, turns: Turns) -> tuple[Sequences, np.ndarray]:
        """Encode all.

        Returns:
            What `Slow.encode` gives, and int64, the conversations for which it was asked.
        """
        frames, which, sure = self._frames_of(turns)
        fast = np.flatnonzero(sure)
        encoded, foreign = self._encode(turns.rows(fast) if len(fast) < len(turns) else turns, frames, which[fast])
        slow = np.append(np.flatnonzero(~sure), fast[foreign])
        if not len(slow):
            return encoded, slow
        kept = np.flatnonzero(~foreign)
        place = np.empty(len(turns), np.int64)
        place[np.append(fast[kept], slow)] = np.append(kept, len(fast) + np.arange(len(slow)))
        return concatenated([encoded, self._slow.encode(turns.rows(slow))]).rows(place), slow

    def _frames_of(self, turns: Turns) -> tuple[list[Frame | None], np.ndarray, np.ndarray]:
        """Frames, which of them is each conversation's (int64[n]), and whether it can be used (bool[n])."""
        names = turns.roles.dictionary_encode()
        codes = names.indices.to_numpy()[turns.index]
        if len(names.dictionary) > 256:
            return [None], np.zeros(len(turns), np.int64), np.zeros(len(turns), bool)
        # A conversation's roles as a string of bytes.
        spelled = pa.Array.from_buffers(
            pa.large_binary(),
            len(turns),
            [None, pa.py_buffer(turns.offsets), pa.py_buffer(codes.astype(np.uint8))],
        ).dictionary_encode()
        roles = names.dictionary.to_pylist()
        found = [self._frames.of(tuple(roles[code] for code in own)) for own in spelled.dictionary.to_pylist()]
        which = spelled.indices.to_numpy()
        sure = np.array([frame is not None for frame in found], bool)[which]
        empty = pc.equal(pc.binary_length(pc.utf8_trim(turns.contents, STRIPPED)), 0)
        uncertain = empty.to_numpy(zero_copy_only=False)
        if self._separable.swallows:
            uncertain = uncertain | _has_loose_ends(turns.contents)
        if self._separable.prefix == "unless_space":
            uncertain = uncertain | pc.starts_with(turns.contents, SPACE).to_numpy(zero_copy_only=False)
        uncertain = uncertain[turns.index]
        if turns.everything.any():
            # Where other turns than the assistant's are is for the reference to tell.
            uncertain |= ~turns.wanted & np.repeat(turns.everything, np.diff(turns.offsets))
        if uncertain.any():
            before = offsets_of(uncertain)
            sure &= np.diff(before[turns.offsets]) == 0
        # Frames are known by roles; with tools they hold somebody's text.
        sure &= turns.tools.is_null().to_numpy(zero_copy_only=False)
        return found, which, sure

    def _encode(self, turns: Turns, frames: list[Frame | None], which: np.ndarray) -> tuple[Sequences, np.ndarray]:
        """The conversations, and which of them (bool[n]) hold what must be looked at as a whole."""
        if not len(turns):
            return _nothing(), np.zeros(0, bool)
        data, places, literals, row_starts = self._laid_out(turns, frames, which)
        fixed_at, head_at, starts, ends, turn_ends = (
            self._frames.table(name)[literals]
            for name in ("fixed_at", "head_at", "learning_starts", "learning_ends", "turn_ends")
        )
        has_fixed = fixed_at >= 0
        fixed_places = places[has_fixed] + fixed_at[has_fixed]
        encoded = self._chunks.encode(data, [fixed_places, places[has_fixed] + head_at[has_fixed], row_starts])
        offsets = np.append(encoded.tokens[encoded.chunk_at(row_starts)], len(encoded.ids))
        # Tokens before the fixed ids of each literal.
        before = np.zeros(len(literals), np.int64)
        before[has_fixed] = encoded.tokens[encoded.chunk_at(fixed_places)]

        ended = np.zeros(len(encoded.ids), bool)
        ending = turn_ends >= 0
        ended[before[ending] + turn_ends[ending] - 1] = True

        starting, closing = starts >= 0, ends >= 0
        first = self._token_at(encoded, places[starting] + starts[starting])
        last = before[closing] + ends[closing]
        # Frames have one such stretch for each assistant turn, in their order.
        wanted = turns.wanted[turns.assistants]
        # Not learned, learned, not learned, ...
        edges = np.stack([first[wanted], last[wanted]], 1).reshape(-1)
        lengths = np.diff(edges, prepend=0, append=len(encoded.ids))
        learned = np.repeat(np.arange(len(lengths)) % 2 == 1, lengths)
        everything = np.flatnonzero(turns.everything)
        if len(everything):
            learned[gather(offsets[everything], np.diff(offsets)[everything])[0]] = True

        foreign = np.zeros(len(turns), bool)
        foreign[np.searchsorted(row_starts, encoded.foreign(), side="right") - 1] = True
        return Sequences(encoded.ids, offsets, learned, ended), foreign

    def _laid_out(
        self, turns: Turns, frames: list[Frame | None], which: np.ndarray
    ) -> tuple[pa.Buffer, np.ndarray, np.ndarray, np.ndarray]:
        """Literal, content, literal, ..., literal of all conversations as bytes.

        Returns:
            The bytes; for each literal, where it starts and its number; where each conversation starts.
        """
        counts = np.diff(turns.offsets)
        literals = _of_rows([() if frame is None else frame.literals for frame in frames], which)
        first_literal = offsets_of(counts + 1)
        first_piece = offsets_of(2 * counts + 1)
        of_row = np.repeat(np.arange(len(turns)), counts + 1)
        literal_piece = first_piece[of_row] + 2 * (np.arange(len(literals)) - first_literal[of_row])
        is_content = np.ones(first_piece[-1], bool)
        is_content[literal_piece] = False

        spelled = pa.array([literal.spelled for literal in self._frames.literals], pa.binary())
        sources = [spelled, turns.contents.cast(pa.binary())]
        content = len(spelled) + turns.index
        trimmed = _of_rows([() if frame is None else frame.trimmed for frame in frames], which)
        if trimmed.any():
            sources.append(pc.utf8_trim(turns.contents, STRIPPED).cast(pa.binary()))
            content += len(turns.contents) * trimmed
        pieces = np.empty(first_piece[-1], np.int64)
        pieces[literal_piece] = literals
        pieces[is_content] = content
        laid_out = pa.concat_arrays(sources).take(pa.array(pieces))
        _, offsets, data = laid_out.buffers()
        starts = np.frombuffer(offsets, np.int32)[: len(pieces) + 1].astype(np.int64)
        return data.slice(0, int(starts[-1])), starts[literal_piece], literals, starts[first_piece[:-1]]

    def _token_at(self, encoded: Encoded, places: np.ndarray) -> np.ndarray:
        """int64: the token that holds each place."""
        chunk = encoded.chunk_at(places)
        # Right behind the last byte there is no chunk.
        chunk = np.minimum(chunk, len(encoded.tokens) - 2)
        return encoded.tokens[chunk] + self._chunks.tokens_before(encoded.numbers(chunk), places - encoded.cuts[chunk])


def _has_loose_ends(contents: pa.StringArray) -> np.ndarray:
    """bool: which of them start or end with whitespace."""
    trimmed = pc.utf8_trim(contents, STRIPPED)
    return pc.not_equal(pc.binary_length(trimmed), pc.binary_length(contents)).to_numpy(zero_copy_only=False)


def _of_rows(values: Sequence[Sequence[int]], which: np.ndarray) -> np.ndarray:
    """int64: `values[i]` for each i in `which`, laid end to end."""
    lengths = np.array([len(own) for own in values], np.int64)
    at, _ = gather(offsets_of(lengths)[:-1][which], lengths[which])
    return np.concatenate([np.asarray(own, np.int64) for own in values])[at]


def either(chat: ChatTokenizer) -> tuple[Fast | None, str]:
    """The fast way, or None and why there is none."""
    try:
        return Fast(chat), ""
    except (NotSeparable, NotVerbatim) as reason:
        return None, str(reason)
