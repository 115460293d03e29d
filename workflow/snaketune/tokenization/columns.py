"""Arrow columns of conversations and pairs, and their encoding by either of two ways that give the same.

`Slow` is `ChatTokenizer`, row by row. `Fast` handles a batch at once: it lays literals and contents out as one run of bytes
(see `frames`), encodes that chunk by chunk (see `chunks`), and finds what is learned from where the literals are. Rows for
which that proves nothing go the slow way: a content that holds an added token's string, is empty, or where whitespace at
its ends matters; and roles that the template treats in a way of their own.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from snaketune.errors import SnaketuneError
from snaketune.tokenization.chat import ChatTokenizer
from snaketune.tokenization.chunks import Chunks, Encoded
from snaketune.tokenization.frames import Frame, Frames
from snaketune.tokenization.ragged import Sequences, concatenated, gather, offsets_of
from snaketune.tokenization.separable import SPACE, NotSeparable, separable
from snaketune.tokenization.template import Message
from snaketune.tokenization.verbatim import NotVerbatim, check_verbatim

# What Python's strip() takes off, as a template's trim does.
STRIPPED = "".join(character for code in range(0x3001) if (character := chr(code)).isspace())
ALL, NOBODY = -1, np.iinfo(np.int64).max


@dataclass(frozen=True)
class Turns:
    """n conversations: turns `index[offsets[i] : offsets[i + 1]]` of `roles` and `contents` are conversation i.

    Attributes:
        roles, contents: strings, of all turns.
        index, offsets: int64.
        context: int64[n]: how many of the first assistant turns aren't learned; ALL for learning every token.
    """

    roles: pa.StringArray
    contents: pa.StringArray
    index: np.ndarray
    offsets: np.ndarray
    context: np.ndarray

    def __len__(self) -> int:
        return len(self.context)

    def rows(self, rows: np.ndarray) -> "Turns":
        """Some of the conversations."""
        at, offsets = gather(self.offsets[rows], np.diff(self.offsets)[rows])
        return Turns(self.roles, self.contents, self.index[at], offsets, self.context[rows])

    def messages(self) -> list[list[Message]]:
        """As templates take them."""
        turns = pa.array(self.index)
        roles, contents = self.roles.take(turns).to_pylist(), self.contents.take(turns).to_pylist()
        flat = [{"role": role, "content": content} for role, content in zip(roles, contents)]
        return [flat[start:end] for start, end in zip(self.offsets[:-1].tolist(), self.offsets[1:].tolist())]


def conversations(table: pa.Table, train_on: str) -> Turns:
    """The column `messages`, of which assistant, last, or all is learned."""
    roles, contents, offsets = _column(table, "messages")
    context = np.zeros(len(table), np.int64)
    if train_on == "all":
        context[:] = ALL
    if train_on == "last":
        context = np.maximum(_assistant_turns(roles, offsets) - 1, 0)
    return Turns(roles, contents, np.arange(len(roles)), offsets, context)


def pairs(table: pa.Table) -> Turns:
    """Prompt and chosen, prompt and rejected, of each row in turn: 2n conversations, whose completions are learned."""
    columns = [_column(table, name) for name in ("prompt", "chosen", "rejected")]
    bases = offsets_of(np.array([len(roles) for roles, _, _ in columns]))
    starts, lengths = [], []
    for column in (0, 1, 0, 2):
        offsets = columns[column][2]
        starts.append(bases[column] + offsets[:-1])
        lengths.append(np.diff(offsets))
    index, ends = gather(np.stack(starts, 1).reshape(-1), np.stack(lengths, 1).reshape(-1))
    context = np.repeat(_assistant_turns(columns[0][0], columns[0][2]), 2)
    roles, contents = (pa.concat_arrays([column[part] for column in columns]) for part in (0, 1))
    return Turns(roles, contents, index, np.ascontiguousarray(ends[::2]), context)


def _column(table: pa.Table, name: str) -> tuple[pa.StringArray, pa.StringArray, np.ndarray]:
    """Roles and contents of all turns, and int64[n + 1], where the rows start among them."""
    column = table.column(name).combine_chunks()
    if isinstance(column, pa.ChunkedArray):
        column = pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
    offsets = column.offsets.to_numpy().astype(np.int64)
    turns = column.flatten()
    fields = dict(zip((field.name for field in turns.type), turns.flatten()))
    roles, contents = (fields[part].cast(pa.string()) for part in ("role", "content"))
    return roles, contents, offsets - offsets[0]


def _assistant_turns(roles: pa.StringArray, offsets: np.ndarray) -> np.ndarray:
    """int64[n]."""
    before = offsets_of(pc.equal(roles, "assistant").to_numpy(zero_copy_only=False))
    return np.diff(before[offsets])


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
        messages = turns.messages()
        for own, context, done in zip(messages, turns.context.tolist(), self._chat.render(messages), strict=True):
            said = sum(message["role"] == "assistant" for message in own)
            if context > 0 and len(done.spans) != said:
                raise SnaketuneError(
                    f"the chat template marks {len(done.spans)} generated blocks where the assistant has {said} turns, so "
                    "it can't be told which of them are to be learned; that needs a template with one "
                    "{% generation %} block per assistant turn"
                )
            learned = np.ones(len(done.ids), bool) if context == ALL else done.supervised(first_span=context)
            ends = np.zeros(len(done.ids), bool)
            ends[self._chat.turn_ends(own, done.ids) - 1] = True
            parts.append(Sequences(done.ids, np.array([0, len(done.ids)]), learned, ends))
        return concatenated(parts)

    def holds_control(self, turns: Turns) -> np.ndarray:
        """bool[n]: whether somebody wrote a control token."""
        return np.array(
            [any(self._chat.control.written_in(turn["content"]) for turn in own) for own in turns.messages()], bool
        )


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
        if uncertain.any():
            before = offsets_of(uncertain[turns.index])
            sure &= np.diff(before[turns.offsets]) == 0
        return found, which, sure

    def _encode(self, turns: Turns, frames: list[Frame | None], which: np.ndarray) -> tuple[Sequences, np.ndarray]:
        """The conversations, and which of them (bool[n]) hold what must be looked at as a whole."""
        counts = np.diff(turns.offsets)
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
        row = np.repeat(np.arange(len(turns)), counts + 1)[starting]
        number = np.arange(len(row)) - np.searchsorted(row, row)
        wanted = number >= turns.context[row]
        # Not learned, learned, not learned, ...
        edges = np.stack([first[wanted], last[wanted]], 1).reshape(-1)
        lengths = np.diff(edges, prepend=0, append=len(encoded.ids))
        learned = np.repeat(np.arange(len(lengths)) % 2 == 1, lengths)
        everything = np.flatnonzero(turns.context == ALL)
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
