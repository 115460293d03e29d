"""Pairs fitted to the row length: whole, or, if longer than a row, as the overflow policy says.

The tokens that both completions begin with are stored once in a row, so they count once:

    prompt and first    [ prompt | common | ......... ]
    second                       [ common | ...... ]        tokens: prompt + first + second - common

A completion with a label (kind `unpaired`) is packed as a pair too. Its second completion is mismatched: it answers another
prompt, that of an earlier row (the first rows take it from the last ones). The distance to that row is the longest run of rows
with one prompt, so that no completion is paired with an answer to its own prompt, and each is used once. KTO estimates from
these how far the policy has moved from its reference, as TRL does within a batch. Mismatched completions don't count as
corpus tokens, so cutting them loses nothing: they get the space that the pair's own tokens leave in a row.
"""

from collections import deque
from dataclasses import dataclass, fields, replace

import numpy as np
import pyarrow as pa

from snaketune.engine.packing.planned_segments import SupervisedRuns
from snaketune.engine.packing.ragged import common_start
from snaketune.engine.packing.settings import PackingSettings
from snaketune.engine.packing.tokens import Tokens
from snaketune.engine.packing.truncation import DropCounts
from snaketune.errors import SnaketuneError

# Completions to read before mapped memory is released.
READ_BEFORE_RELEASE = 65536


class CompletionTokens:
    """The memory-mapped tokens of a split's sequences."""

    def __init__(self, parts: Tokens, split: str):
        self._parts, self.runs = parts, SupervisedRuns.read(parts, split)
        views = parts.views(split)
        self._values = views.values
        self._batch, self._begin = views.locations()
        self._read = 0

    def ids(self, sequence: int, start: int, tokens: int) -> np.ndarray:
        """int32[tokens], a view."""
        begin = self._begin[sequence] + start
        return self._values[self._batch[sequence]][begin : begin + tokens]

    def key(self, sequence: int, start: int, tokens: int) -> bytes:
        """Four bytes per token, to compare completions by: its id and whether it is supervised."""
        self._read += 1
        if self._read > READ_BEFORE_RELEASE:
            self._parts.release()
            self._read = 0
        key = self.ids(sequence, start, tokens) << 1
        low, high = self.runs.offsets[sequence : sequence + 2]
        edges = self.runs.values[low:high].tolist()
        for begin, end in zip(edges[::2], edges[1::2]):
            key[max(begin - start, 0) : max(end - start, 0)] |= 1
        return key.tobytes()


def common_tokens(a: bytes, b: bytes) -> int:
    """The number of leading tokens that are equal in id and supervision, given two keys of `CompletionTokens`."""
    return common_start(np.frombuffer(a, np.int32), np.frombuffer(b, np.int32))


@dataclass(frozen=True, kw_only=True)
class PlannedPairs:
    """P pairs, in the order of their sequences.

    Attributes:
        sequence: int32[P], the sequence that begins with the prompt and the first (chosen) completion.
        second_sequence, second_start: int32[P], the sequence of the second completion, and its start there.
        prompt, first, second: int32[P], tokens of the prompt and of each completion.
        common: int32[P], leading tokens of the completions that are equal in id and supervision.
        prompt_hash: uint64[P], equal for equal prompts.
        mismatched: whether the second completions answer other prompts.
    """

    sequence: np.ndarray
    second_sequence: np.ndarray
    second_start: np.ndarray
    prompt: np.ndarray
    first: np.ndarray
    second: np.ndarray
    common: np.ndarray
    prompt_hash: np.ndarray
    mismatched: bool = False

    def __len__(self) -> int:
        return len(self.sequence)

    @property
    def corpus_tokens(self) -> np.ndarray:
        """int32[P]: tokens of each pair in the corpus, which exclude mismatched completions."""
        return self.prompt + self.first + (0 if self.mismatched else self.second)

    @property
    def tokens(self) -> np.ndarray:
        """int32[P]: tokens of each pair in a row of its own."""
        return self.prompt + self.first + self.second - self.common

    @property
    def equal(self) -> np.ndarray:
        """bool[P]: whether the completions are the same."""
        return (self.common == self.first) & (self.common == self.second)

    def take(self, which: np.ndarray) -> "PlannedPairs":
        names = [field.name for field in fields(self) if field.name != "mismatched"]
        return replace(self, **{name: getattr(self, name)[which] for name in names})

    def supervised(self, runs: SupervisedRuns) -> np.ndarray:
        """bool[P]: whether both completions have a supervised token."""
        first = runs.count(self.sequence, self.prompt, self.prompt + self.first)
        second = runs.count(self.second_sequence, self.second_start, self.second_start + self.second)
        return (first > 0) & (second > 0)


def whole_pairs(kind: str, index: pa.Table, tokens: CompletionTokens) -> PlannedPairs:
    """All pairs of a split whose completions both have a supervised token, given its token index.

    Each completion ends with its last supervised token: the tokens after it (the line break that many templates put after a
    turn) predict nothing that is learned.
    """
    length, prompt, chosen, common, prompt_hash = (
        index[name].to_numpy() for name in ("length", "prompt", "chosen", "common", "prompt_hash")
    )
    sequence, runs = np.arange(len(length), dtype=np.int32), tokens.runs
    first = runs.last_end(sequence, prompt, prompt + chosen) - prompt
    second = runs.last_end(sequence, prompt + chosen, length) - prompt - chosen
    pairs = PlannedPairs(
        sequence=sequence,
        second_sequence=sequence,
        second_start=prompt + chosen,
        prompt=prompt,
        first=first,
        second=second,
        common=np.minimum(common, np.minimum(first, second)),
        prompt_hash=prompt_hash,
    )
    if kind == "preference":
        return pairs.take(pairs.supervised(runs))
    pairs = pairs.take(index["supervised"].to_numpy() > 0)
    distance = _longest_prompt_run(pairs.prompt_hash)
    before = np.roll(pairs.sequence, distance)
    return replace(
        pairs,
        second_sequence=before,
        second_start=prompt[before],
        second=first[before],
        common=_common_with_earlier(pairs, tokens, distance),
        mismatched=True,
    )


def _longest_prompt_run(prompt_hash: np.ndarray) -> int:
    """The length of the longest run of rows with one of several prompts, where the last row precedes the first, or 1.

    >>> [_longest_prompt_run(np.array(hashes)) for hashes in ([1, 2, 1, 3], [1, 2, 2, 1, 1], [1, 1], [])]
    [1, 3, 1, 1]
    """
    begins = np.flatnonzero(prompt_hash != np.roll(prompt_hash, 1))
    return int(np.diff(begins, append=begins[0] + len(prompt_hash)).max()) if len(begins) else 1


def _common_with_earlier(completions: PlannedPairs, tokens: CompletionTokens, distance: int) -> np.ndarray:
    """int32[P], the leading tokens that each first completion shares with the one `distance` rows before it."""
    columns = (completions.sequence, completions.prompt, completions.first)
    ranges = list(zip(*(column.tolist() for column in columns)))
    # The last row precedes the first.
    before: deque[bytes] = deque(tokens.key(*completion) for completion in ranges[-distance:])
    common = []
    for completion in ranges:
        before.append(tokens.key(*completion))
        common.append(common_tokens(before.popleft(), before[-1]))
    return np.array(common, np.int32)


def fit_pairs(
    settings: PackingSettings,
    row_length: int,
    index: pa.Table,
    whole: PlannedPairs,
    runs: SupervisedRuns,
    drops: DropCounts,
) -> PlannedPairs:
    """The pairs of a split that fit into rows of `row_length` tokens, and count in `drops` what isn't packed whole.

    Args:
        index: the token index that `tokenize` wrote.
        whole: the pairs before any are cut.
    Raises:
        SnaketuneError: a pair longer than a row, and `overflow` is `raise`.
    """
    excluded = np.ones(len(index), bool)
    excluded[whole.sequence] = False
    length = index["length"].to_numpy()
    drops.drop("refused_by_template", int((length == 0).sum()), 0)
    drops.drop("nothing_supervised", int((excluded & (length > 0)).sum()), int(length[excluded].sum()))
    drops.drop("after_last_supervised", 0, int(length[~excluded].sum() - whole.corpus_tokens.sum()))
    if whole.mismatched:
        pairs = _shorten_mismatched(whole, row_length, runs)
    else:
        # They state no preference: for example, they differ in outer blanks, which the chat template trims.
        drops.drop("equal_completions", int(whole.equal.sum()), int(whole.corpus_tokens[whole.equal].sum()))
        pairs = whole.take(~whole.equal)
    too_long = pairs.tokens > row_length
    if not too_long.any():
        return pairs
    if settings.overflow == "raise":
        at = int(too_long.argmax())
        raise SnaketuneError(
            f"pair {index['id'][int(pairs.sequence[at])]} has {pairs.tokens[at]} tokens, packing.length is {row_length}; "
            "raise the length, or set packing.overflow to drop or truncate"
        )
    if settings.overflow == "drop":
        drops.drop("longer_than_row", int(too_long.sum()), int(pairs.corpus_tokens[too_long].sum()))
        return pairs.take(~too_long)
    cut = _truncate_unpaired(pairs, row_length, runs) if pairs.mismatched else _truncate(pairs, row_length)
    filled = too_long & ~cut.supervised(runs)
    equal = too_long & ~filled & cut.equal & (not pairs.mismatched)
    for reason, rows in (("prompt_fills_row", filled), ("equal_completions_in_a_row", equal)):
        drops.drop(reason, int(rows.sum()), int(pairs.corpus_tokens[rows].sum()))
    dropped = filled | equal
    drops.truncated_rows += int((too_long & ~dropped).sum())
    drops.truncated_tokens += int((pairs.corpus_tokens - cut.corpus_tokens)[~dropped].sum())
    return cut.take(~dropped)


def _shorten_mismatched(pairs: PlannedPairs, row_length: int, runs: SupervisedRuns) -> PlannedPairs:
    """Cut mismatched completions to the free space of a row, where that is enough for a supervised token."""
    space = np.maximum(row_length - pairs.prompt - pairs.first, 0) + pairs.common
    cut = replace(pairs, second=np.minimum(pairs.second, space))
    return replace(pairs, second=np.where(cut.supervised(runs), cut.second, pairs.second))


def _truncate_unpaired(pairs: PlannedPairs, row_length: int, runs: SupervisedRuns) -> PlannedPairs:
    """Cut completions to the space that the prompt leaves; the mismatched one keeps its first supervised token."""
    space, start = np.maximum(row_length - pairs.prompt, 0), pairs.second_start
    needed = runs.first_end(pairs.second_sequence, start, start + pairs.second) - start
    first = np.minimum(pairs.first, np.maximum(space - np.maximum(needed - pairs.common, 0), 0))
    common = np.minimum(pairs.common, first)
    return replace(pairs, first=first, second=np.minimum(pairs.second, common + space - first), common=common)


def _truncate(pairs: PlannedPairs, row_length: int) -> PlannedPairs:
    """Cut both to the space beside prompt and common tokens; space that a short one doesn't need goes to the other."""
    space = np.maximum(row_length - pairs.prompt - pairs.common, 0)
    first, second = pairs.first - pairs.common, pairs.second - pairs.common
    own_first = np.minimum(first, np.maximum(space // 2, space - second))
    own_second = np.minimum(second, space - own_first)
    common = np.minimum(pairs.common, np.maximum(row_length - pairs.prompt, 0))
    return replace(pairs, first=common + own_first, second=common + own_second, common=common)
