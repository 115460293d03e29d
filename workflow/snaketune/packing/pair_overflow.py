"""What of each pair goes into rows: all of it, or, where it is longer than a row, what the overflow policy leaves.

What both completions begin with stands in a row once, so it counts once:

    prompt and first    [ prompt | common | ......... ]
    second                       [ common | ...... ]        tokens: prompt + first + second - common

A completion with a label becomes a pair as well: its second completion is that of the row before it (the first row's, of the
last), which has nothing to do with its prompt. Where rows of one prompt stand together, it is as many rows before as the most
of these, so that none stands beside an answer to its own prompt, and each completion stands beside one. KTO estimates by these
how far a model has moved away from its reference, as TRL does within a batch. They are no tokens of the corpus that anything
could be lost of: they get what their row has left.
"""

from collections import deque
from dataclasses import dataclass, fields, replace

import numpy as np
import pyarrow as pa

from snaketune.errors import SnaketuneError
from snaketune.packing.completion_tokens import Spelling, common_tokens
from snaketune.packing.conversation_overflow import Losses
from snaketune.packing.supervised_runs import Runs
from snaketune.stages.specs import PlanSpec


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """P pairs, in the order of their sequences.

    Attributes:
        sequence: int32[P], whose first tokens are the prompt and then the first completion, which is the chosen one.
        second_sequence, second_start: int32[P], where the second completion is.
        prompt, first, second: int32[P], how many tokens of each there are.
        common: int32[P], with how many tokens both completions begin, of which the same are supervised.
        prompt_hash: uint64[P], equal where prompts are.
        mismatched: whether the second completions are of other prompts.
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
    def read(self) -> np.ndarray:
        """int32[P]: tokens that the corpus has of it."""
        return self.prompt + self.first + (0 if self.mismatched else self.second)

    @property
    def tokens(self) -> np.ndarray:
        """int32[P]: tokens in a row that holds nothing else."""
        return self.prompt + self.first + self.second - self.common

    @property
    def equal(self) -> np.ndarray:
        """bool[P]: whether the completions are the same."""
        return (self.common == self.first) & (self.common == self.second)

    def take(self, which: np.ndarray) -> "Pairs":
        return replace(self, **{name: getattr(self, name)[which] for name in ARRAYS})

    def supervised(self, runs: Runs) -> np.ndarray:
        """bool[P]: whether both completions have a supervised token."""
        first = runs.count(self.sequence, self.prompt, self.prompt + self.first)
        second = runs.count(self.second_sequence, self.second_start, self.second_start + self.second)
        return (first > 0) & (second > 0)


ARRAYS = tuple(field.name for field in fields(Pairs) if field.name != "mismatched")


def whole_pairs(kind: str, index: pa.Table, spelling: Spelling) -> Pairs:
    """All pairs of a split of which both completions have something supervised, each up to its last supervised token: what
    comes after it (the line break that many templates put behind a turn) predicts nothing that is learned.

    Args:
        index: what `tokenize` wrote.
    """
    length, prompt, chosen, common, prompt_hash = (
        index[name].to_numpy() for name in ("length", "prompt", "chosen", "common", "prompt_hash")
    )
    sequence, runs = np.arange(len(length), dtype=np.int32), spelling.runs
    first = runs.last_end(sequence, prompt, prompt + chosen) - prompt
    second = runs.last_end(sequence, prompt + chosen, length) - prompt - chosen
    pairs = Pairs(
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
    distance = _most_together(pairs.prompt_hash)
    before = np.roll(pairs.sequence, distance)
    return replace(
        pairs,
        second_sequence=before,
        second_start=prompt[before],
        second=first[before],
        common=_common(pairs, spelling, distance),
        mismatched=True,
    )


def _most_together(prompt_hash: np.ndarray) -> int:
    """How many rows of one prompt come one after the other, at most; the last row is before the first. 1 if there is but one
    prompt.

    >>> [_most_together(np.array(hashes)) for hashes in ([1, 2, 1, 3], [1, 2, 2, 1, 1], [1, 1], [])]
    [1, 3, 1, 1]
    """
    begins = np.flatnonzero(prompt_hash != np.roll(prompt_hash, 1))
    if not len(begins):
        return 1
    return int(np.diff(begins, append=begins[0] + len(prompt_hash)).max())


def _common(completions: Pairs, spelling: Spelling, distance: int) -> np.ndarray:
    """int32[P]: with how many tokens each of these begins as the one `distance` before it does."""
    columns = (completions.sequence, completions.prompt, completions.first)
    places = list(zip(*(column.tolist() for column in columns)))
    # The one before the first is the last.
    before: deque[bytes] = deque(spelling.completion(*place) for place in places[-distance:])
    found = []
    for place in places:
        before.append(spelling.completion(*place))
        found.append(common_tokens(before.popleft(), before[-1]))
    return np.array(found, np.int32)


def pairs_of(spec: PlanSpec, row_length: int, index: pa.Table, whole: Pairs, runs: Runs, losses: Losses) -> Pairs:
    """What is packed of the pairs of a split.

    Args:
        row_length: tokens of the longest rows.
        index: what `tokenize` wrote.
        whole: the pairs, nothing cut.
        losses: counts what is left out.
    Raises:
        SnaketuneError: a pair longer than a row where `overflow` is `raise`.
    """
    left_out = np.ones(len(index), bool)
    left_out[whole.sequence] = False
    length = index["length"].to_numpy()
    losses.drop("refused_by_template", int((length == 0).sum()), 0)
    losses.drop("nothing_supervised", int((left_out & (length > 0)).sum()), int(length[left_out].sum()))
    losses.drop("after_last_supervised", 0, int(length[~left_out].sum() - whole.read.sum()))
    pairs = _fitted(whole, row_length, runs) if whole.mismatched else whole
    too_long = pairs.tokens > row_length
    if not too_long.any():
        return pairs
    if spec.overflow == "raise":
        at = int(too_long.argmax())
        raise SnaketuneError(
            f"pair {index['id'][int(pairs.sequence[at])]} has {pairs.tokens[at]} tokens, packing.length is {row_length}; "
            "raise the length, or set packing.overflow to drop or truncate"
        )
    if spec.overflow == "drop":
        losses.drop("longer_than_row", int(too_long.sum()), int(pairs.read[too_long].sum()))
        return pairs.take(~too_long)
    cut = _truncated_own(pairs, row_length, runs) if pairs.mismatched else _truncated(pairs, row_length)
    # Completions that differ only in what was cut off tell no preference.
    lost = too_long & (~cut.supervised(runs) | (cut.equal & (not pairs.mismatched)))
    losses.drop("prompt_fills_row", int(lost.sum()), int(pairs.read[lost].sum()))
    losses.truncated_rows += int((too_long & ~lost).sum())
    losses.truncated_tokens += int((pairs.read - cut.read)[~lost].sum())
    return cut.take(~lost)


def _fitted(pairs: Pairs, row_length: int, runs: Runs) -> Pairs:
    """Mismatched completions cut to what a row has left, where that is enough for a supervised token."""
    room = np.maximum(row_length - pairs.prompt - pairs.first, 0) + pairs.common
    cut = replace(pairs, second=np.minimum(pairs.second, room))
    return replace(pairs, second=np.where(cut.supervised(runs), cut.second, pairs.second))


def _truncated_own(pairs: Pairs, row_length: int, runs: Runs) -> Pairs:
    """Completions cut to what the prompt leaves of a row, less what a mismatched one needs to have a supervised token."""
    room, start = np.maximum(row_length - pairs.prompt, 0), pairs.second_start
    needed = runs.first_end(pairs.second_sequence, start, start + pairs.second) - start
    first = np.minimum(pairs.first, np.maximum(room - np.maximum(needed - pairs.common, 0), 0))
    common = np.minimum(pairs.common, first)
    return replace(pairs, first=first, second=np.minimum(pairs.second, common + room - first), common=common)


def _truncated(pairs: Pairs, row_length: int) -> Pairs:
    """Completions cut to what prompt and common beginning leave of a row; a short one leaves more to the other."""
    shared = pairs.prompt + pairs.common
    room = np.maximum(row_length - shared, 0)
    first, second = pairs.first - pairs.common, pairs.second - pairs.common
    kept_first = np.minimum(first, np.maximum(room // 2, room - second))
    kept_second = np.minimum(second, room - kept_first)
    common = np.minimum(pairs.common, np.maximum(row_length - pairs.prompt, 0))
    return replace(pairs, first=common + kept_first, second=common + kept_second, common=common)
