"""A batch of conversations as one run of bytes, encoded chunk by chunk.

Literals and contents are laid out side by side (see `frames`), encoded (see `chunks`), and what is supervised is found from
where the literals are. Rows for which that proves nothing go the ordinary path: a content that holds an added token's string,
is empty, or where whitespace at its ends matters; roles that the template treats in a way of their own; prompts that
offer tools, and tool calls that the template has a form of its own for; and turns left out where everything else is supervised.
"""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from snaketune.tokenization.batched.chunks import ChunkedTokens, Chunks
from snaketune.tokenization.batched.frames import Frame, Frames
from snaketune.tokenization.batched.separable import SPACE, NotSeparable, Separable, separable
from snaketune.tokenization.batched.verbatim import NotVerbatim, check_verbatim
from snaketune.tokenization.chat import ChatTokenizer
from snaketune.tokenization.encode_rows import encode_turns
from snaketune.tokenization.encoded_rows import EncodedBatch, concatenated
from snaketune.tokenization.ragged import gather, offsets_of
from snaketune.tokenization.tool_calls import OPEN
from snaketune.tokenization.turn_columns import Turns

# What Python's strip() takes off, as a template's trim does.
STRIPPED = "".join(character for code in range(0x3001) if (character := chr(code)).isspace())


def batched_encoder(chat: ChatTokenizer) -> "tuple[BatchedEncoder | None, str]":
    """The encoder, or None and why nothing is proved of this tokenizer or template."""
    try:
        check_verbatim(chat.template)
        return BatchedEncoder(chat, separable(chat.description)), ""
    except (NotSeparable, NotVerbatim) as reason:
        return None, str(reason)


class BatchedEncoder:
    """Encodes with a tokenizer and template of which both proofs hold."""

    def __init__(self, chat: ChatTokenizer, separable: Separable):
        self._chat, self._separable = chat, separable
        self._chunks = Chunks(self._separable)
        self._frames = Frames(chat, self._separable, self._chunks)

    def encode(self, turns: Turns) -> tuple[EncodedBatch, np.ndarray]:
        """Encode all.

        Returns:
            What `encode_turns` gives, and int64, the conversations for which it was asked.
        """
        frames, which, sure = self._frames_of(turns)
        framed = np.flatnonzero(sure)
        encoded, foreign = self._encode(
            turns.rows(framed) if len(framed) < len(turns) else turns, frames, which[framed]
        )
        left = np.append(np.flatnonzero(~sure), framed[foreign])
        if not len(left):
            return encoded, left
        kept = np.flatnonzero(~foreign)
        place = np.empty(len(turns), np.int64)
        place[np.append(framed[kept], left)] = np.append(kept, len(framed) + np.arange(len(left)))
        return concatenated([encoded, encode_turns(self._chat, turns.rows(left))]).rows(place), left

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
        if self._chat.reads_calls:
            uncertain = uncertain | pc.match_substring(turns.contents, OPEN).to_numpy(zero_copy_only=False)
        uncertain = uncertain[turns.index]
        if turns.everything.any():
            # Where other turns than the assistant's are is for the ordinary path to tell.
            uncertain |= ~turns.wanted & np.repeat(turns.everything, np.diff(turns.offsets))
        if uncertain.any():
            before = offsets_of(uncertain)
            sure &= np.diff(before[turns.offsets]) == 0
        # Frames are known by roles; with tools they hold somebody's text.
        sure &= turns.tools.is_null().to_numpy(zero_copy_only=False)
        return found, which, sure

    def _encode(self, turns: Turns, frames: list[Frame | None], which: np.ndarray) -> tuple[EncodedBatch, np.ndarray]:
        """The conversations, and which of them (bool[n]) hold what must be looked at as a whole."""
        if not len(turns):
            return concatenated([]), np.zeros(0, bool)
        data, places, literals, row_starts = self._laid_out(turns, frames, which)
        fixed_at, head_at, starts, ends, turn_ends = (
            self._frames.table(name)[literals]
            for name in ("fixed_at", "head_at", "supervised_from", "supervised_to", "turn_ends")
        )
        has_fixed = fixed_at >= 0
        fixed_places = places[has_fixed] + fixed_at[has_fixed]
        chunked = self._chunks.encode(data, [fixed_places, places[has_fixed] + head_at[has_fixed], row_starts])
        offsets = np.append(chunked.tokens[chunked.chunk_at(row_starts)], len(chunked.ids))
        # Tokens before the fixed ids of each literal.
        before = np.zeros(len(literals), np.int64)
        before[has_fixed] = chunked.tokens[chunked.chunk_at(fixed_places)]

        ended = np.zeros(len(chunked.ids), bool)
        ending = turn_ends >= 0
        ended[before[ending] + turn_ends[ending] - 1] = True

        starting, closing = starts >= 0, ends >= 0
        first = self._token_at(chunked, places[starting] + starts[starting])
        last = before[closing] + ends[closing]
        # Frames have one such stretch for each assistant turn, in their order.
        wanted = turns.wanted[turns.assistants]
        # Not supervised, supervised, not supervised, ...
        edges = np.stack([first[wanted], last[wanted]], 1).reshape(-1)
        lengths = np.diff(edges, prepend=0, append=len(chunked.ids))
        supervised = np.repeat(np.arange(len(lengths)) % 2 == 1, lengths)
        everything = np.flatnonzero(turns.everything)
        if len(everything):
            supervised[gather(offsets[everything], np.diff(offsets)[everything])[0]] = True

        foreign = np.zeros(len(turns), bool)
        foreign[np.searchsorted(row_starts, chunked.foreign(), side="right") - 1] = True
        return EncodedBatch(chunked.ids, offsets, supervised, ended), foreign

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

    def _token_at(self, chunked: ChunkedTokens, places: np.ndarray) -> np.ndarray:
        """int64: the token that holds each place."""
        chunk = chunked.chunk_at(places)
        # Right after the last byte there is no chunk.
        chunk = np.minimum(chunk, len(chunked.tokens) - 2)
        return chunked.tokens[chunk] + self._chunks.tokens_before(chunked.numbers(chunk), places - chunked.cuts[chunk])


def _has_loose_ends(contents: pa.StringArray) -> np.ndarray:
    """bool: which of them start or end with whitespace."""
    trimmed = pc.utf8_trim(contents, STRIPPED)
    return pc.not_equal(pc.binary_length(trimmed), pc.binary_length(contents)).to_numpy(zero_copy_only=False)


def _of_rows(values: Sequence[Sequence[int]], which: np.ndarray) -> np.ndarray:
    """int64: `values[i]` for each i in `which`, laid end to end."""
    lengths = np.array([len(own) for own in values], np.int64)
    at, _ = gather(offsets_of(lengths)[:-1][which], lengths[which])
    return np.concatenate([np.asarray(own, np.int64) for own in values])[at]
