"""A batch of conversations as one byte string, encoded chunk by chunk.

Literals and contents are concatenated (see `frames`) and encoded (see `chunks`); the supervised tokens follow from the
positions of the literals. Rows that the proofs don't cover go to the reference path: a content that contains an added token's
string, is empty, or has whitespace at its ends that matters; a turn that doesn't follow the tokens of its prompt (see
`prompt_boundaries`); sequences of roles for which `frames` has no frame; rows with tools or template variables, and tool calls
that the template writes in its own form; reasoning, where the template writes an empty block without it; and turns of other
weights than 1 where everything is supervised.
"""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from snaketune.engine.packing.ragged import alternating, gather, offsets_of
from snaketune.tokenization.batched.chunks import ChunkedTokens, ChunkEncoder
from snaketune.tokenization.batched.frames import Frame, Frames
from snaketune.tokenization.batched.separable import SPACE, NotSeparable, Separable, separable
from snaketune.tokenization.batched.verbatim import NotVerbatim, check_verbatim
from snaketune.tokenization.chat import ChatTokenizer
from snaketune.tokenization.encode_rows import encode_turns
from snaketune.tokenization.encoded_rows import EncodedBatch, concatenated
from snaketune.tokenization.reasoning import BLOCK
from snaketune.tokenization.tool_calls import OPEN
from snaketune.tokenization.turn_columns import Turns

# The characters that Python's strip() removes, as a template's trim does.
STRIPPED = "".join(character for code in range(0x3001) if (character := chr(code)).isspace())


def batched_encoder(chat: ChatTokenizer) -> "tuple[BatchedEncoder | None, str]":
    """The encoder, or None and the reason why this tokenizer or template isn't proved."""
    try:
        check_verbatim(chat.template.text)
        return BatchedEncoder(chat, separable(chat.description)), ""
    except (NotSeparable, NotVerbatim) as reason:
        return None, str(reason)


class BatchedEncoder:
    """Encodes with a tokenizer and a template for which both proofs hold."""

    def __init__(self, chat: ChatTokenizer, separable: Separable):
        self._chat, self._separable = chat, separable
        self._chunks = ChunkEncoder(separable)
        self._frames = Frames(chat, separable, self._chunks)

    def encode(self, turns: Turns) -> tuple[EncodedBatch, np.ndarray]:
        """The result of `encode_turns`, and int64, the conversations that were passed to it."""
        frames, which = self._frames_of(turns)
        covered = np.array([frame is not None for frame in frames], bool)[which] & ~self._uncertain(turns)
        framed = np.flatnonzero(covered)
        encoded, reserved = self._encode(
            turns.rows(framed) if len(framed) < len(turns) else turns, frames, which[framed]
        )
        fallback = np.append(np.flatnonzero(~covered), framed[reserved])
        if not len(fallback):
            return encoded, fallback
        batched = np.flatnonzero(~reserved)
        order = np.empty(len(turns), np.int64)
        order[np.append(framed[batched], fallback)] = np.append(batched, len(framed) + np.arange(len(fallback)))
        return concatenated([encoded, encode_turns(self._chat, turns.rows(fallback))]).rows(order), fallback

    def _frames_of(self, turns: Turns) -> tuple[list[Frame | None], np.ndarray]:
        """The frames, and int64[n], each conversation's index in them."""
        names = turns.roles.dictionary_encode()
        if len(names.dictionary) > 256:
            return [None], np.zeros(len(turns), np.int64)
        # The roles of each conversation as a byte string.
        codes = names.indices.to_numpy()[turns.index].astype(np.uint8)
        buffers = [None, pa.py_buffer(turns.offsets), pa.py_buffer(codes)]
        role_strings = pa.Array.from_buffers(pa.large_binary(), len(turns), buffers).dictionary_encode()
        roles = names.dictionary.to_pylist()
        frames = [
            self._frames.get(tuple(roles[code] for code in role_string))
            for role_string in role_strings.dictionary.to_pylist()
        ]
        return frames, role_strings.indices.to_numpy()

    def _uncertain(self, turns: Turns) -> np.ndarray:
        """bool[n], which conversations the proofs don't cover because of a content or of their tools."""
        trimmed = pc.binary_length(pc.utf8_trim(turns.contents, STRIPPED))
        contents = [pc.equal(trimmed, 0)]
        if self._separable.strips_whitespace:
            contents.append(pc.not_equal(trimmed, pc.binary_length(turns.contents)))
        if self._separable.prefix == "unless_space":
            contents.append(pc.starts_with(turns.contents, SPACE))
        if self._chat.template.reads_calls:
            contents.append(pc.match_substring(turns.contents, OPEN))
        if self._chat.template.empty_block:
            contents.append(pc.match_substring_regex(turns.contents, BLOCK))
        uncertain = np.any([flags.to_numpy(zero_copy_only=False) for flags in contents], 0)[turns.index]
        # Only the reference path knows the tokens of turns of other roles.
        uncertain |= (turns.wanted != 1) & np.repeat(turns.everything, np.diff(turns.offsets))
        # Frames are cached by roles; with tools or variables they also contain text of the row.
        more = pc.or_(turns.tools.is_valid(), turns.variables.is_valid()).to_numpy(zero_copy_only=False)
        return more | (np.diff(offsets_of(uncertain)[turns.offsets]) > 0)

    def _encode(self, turns: Turns, frames: list[Frame | None], which: np.ndarray) -> tuple[EncodedBatch, np.ndarray]:
        """Encode the conversations; also return bool[n], which need the reference path: they contain a reserved string, or
        a turn that doesn't follow the tokens of its prompt."""
        if not len(turns):
            return concatenated([]), np.zeros(0, bool)
        data, positions, literals, row_starts = self._concatenate(turns, frames, which)
        fixed_at, head_at, starts, ends, turn_ends = (
            self._frames.table(name)[literals]
            for name in ("fixed_at", "head_at", "supervised_from", "supervised_to", "turn_ends")
        )
        has_fixed = fixed_at >= 0
        fixed_positions = positions[has_fixed] + fixed_at[has_fixed]
        chunked = self._chunks.encode(data, [fixed_positions, positions[has_fixed] + head_at[has_fixed], row_starts])
        offsets = np.append(chunked.tokens[chunked.chunk_at(row_starts)], len(chunked.ids))
        # The number of tokens before the fixed ids of each literal.
        before = np.zeros(len(literals), np.int64)
        before[has_fixed] = chunked.tokens[chunked.chunk_at(fixed_positions)]

        ended = np.zeros(len(chunked.ids), bool)
        ending = turn_ends >= 0
        ended[before[ending] + turn_ends[ending] - 1] = True

        starting, closing = starts >= 0, ends >= 0
        first = self._token_at(chunked, positions[starting] + starts[starting])
        last = before[closing] + ends[closing]
        # Frames have one supervised span per assistant turn, in order.
        weights = turns.wanted[turns.assistants]
        wanted = weights > 0
        edges = np.stack([first[wanted], last[wanted]], 1).reshape(-1)
        supervised = alternating(edges, len(chunked.ids), weights[wanted])
        everything = np.flatnonzero(turns.everything)
        if len(everything):
            supervised[gather(offsets[everything], np.diff(offsets)[everything])[0]] = True

        # Turns that don't follow the tokens of their prompt, which begins after the fixed ids.
        heads = (positions + head_at)[starting][wanted]
        prompts = [np.array(literal.prompt, np.int64) for literal in self._frames.literals]
        lengths = np.array([len(prompt) for prompt in prompts], np.int64)[literals[starting][wanted]]
        at, _ = gather(chunked.tokens[chunked.chunk_at(heads)], lengths)
        different = chunked.ids[at] != _of_rows(prompts, literals[starting][wanted])
        reserved = np.zeros(len(turns), bool)
        for bytes_ in (chunked.reserved, np.repeat(heads, lengths)[different]):
            reserved[np.searchsorted(row_starts, bytes_, side="right") - 1] = True
        return EncodedBatch(chunked.ids, offsets, supervised, ended), reserved

    def _concatenate(
        self, turns: Turns, frames: list[Frame | None], which: np.ndarray
    ) -> tuple[pa.Buffer, np.ndarray, np.ndarray, np.ndarray]:
        """Concatenate the literal, content, literal, ..., literal of all conversations.

        Returns:
            The bytes; the start of each literal, and its number; the start of each conversation.
        """
        counts = np.diff(turns.offsets)
        literals = _of_rows([() if frame is None else frame.literals for frame in frames], which)
        first_part = offsets_of(2 * counts + 1)
        # Literals and contents alternate within a conversation, which begins and ends with a literal.
        literal_part = 2 * np.arange(len(literals)) - np.repeat(np.arange(len(turns)), counts + 1)
        is_content = np.ones(first_part[-1], bool)
        is_content[literal_part] = False

        literal_bytes = pa.array([literal.data for literal in self._frames.literals], pa.binary())
        sources = [literal_bytes, turns.contents.cast(pa.binary())]
        content = len(literal_bytes) + turns.index
        trimmed = _of_rows([() if frame is None else frame.trimmed for frame in frames], which)
        if trimmed.any():
            sources.append(pc.utf8_trim(turns.contents, STRIPPED).cast(pa.binary()))
            content += len(turns.contents) * trimmed
        parts = np.empty(first_part[-1], np.int64)
        parts[literal_part] = literals
        parts[is_content] = content
        _, offsets, data = pa.concat_arrays(sources).take(pa.array(parts)).buffers()
        starts = np.frombuffer(offsets, np.int32)[: len(parts) + 1].astype(np.int64)
        return data.slice(0, int(starts[-1])), starts[literal_part], literals, starts[first_part[:-1]]

    def _token_at(self, chunked: ChunkedTokens, positions: np.ndarray) -> np.ndarray:
        """int64, the token at each position (in bytes)."""
        # The position after the last byte is in no chunk.
        chunk = np.minimum(chunked.chunk_at(positions), len(chunked.tokens) - 2)
        numbers = chunked.numbers[chunked.which[chunk]]
        return chunked.tokens[chunk] + self._chunks.tokens_before(numbers, positions - chunked.cuts[chunk])


def _of_rows(values: list[np.ndarray], which: np.ndarray) -> np.ndarray:
    """int64, the concatenation of `values[i]` for each i in `which`."""
    lengths = np.array([len(array) for array in values], np.int64)
    at, _ = gather(offsets_of(lengths)[:-1][which], lengths[which])
    return np.concatenate([np.asarray(array, np.int64) for array in values])[at]
