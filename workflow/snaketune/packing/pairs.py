"""What of each pair goes into rows: all of it, or, where it is longer than a row, what the overflow policy leaves.

What both completions begin with stands in a row once, so it counts once:

    prompt and first    [ prompt | common | ......... ]
    second                       [ common | ...... ]        tokens: prompt + first + second - common
"""

from dataclasses import dataclass, fields, replace

import numpy as np
import pyarrow as pa

from snaketune.errors import SnaketuneError
from snaketune.packing.pieces import Losses
from snaketune.packing.supervision import Runs
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
    """

    sequence: np.ndarray
    second_sequence: np.ndarray
    second_start: np.ndarray
    prompt: np.ndarray
    first: np.ndarray
    second: np.ndarray
    common: np.ndarray
    prompt_hash: np.ndarray

    def __len__(self) -> int:
        return len(self.sequence)

    @property
    def read(self) -> np.ndarray:
        """int32[P]: tokens, each completion counted whole."""
        return self.prompt + self.first + self.second

    @property
    def tokens(self) -> np.ndarray:
        """int32[P]: tokens in a row that holds nothing else."""
        return self.read - self.common

    @property
    def equal(self) -> np.ndarray:
        """bool[P]: whether the completions are the same."""
        return (self.common == self.first) & (self.common == self.second)

    def take(self, which: np.ndarray) -> "Pairs":
        return Pairs(**{name.name: getattr(self, name.name)[which] for name in fields(self)})

    def supervised(self, runs: Runs) -> np.ndarray:
        """bool[P]: whether both completions have a supervised token."""
        first = runs.count(self.sequence, self.prompt, self.prompt + self.first)
        second = runs.count(self.second_sequence, self.second_start, self.second_start + self.second)
        return (first > 0) & (second > 0)


def pairs_of(spec: PlanSpec, row_length: int, index: pa.Table, runs: Runs, losses: Losses) -> Pairs:
    """What is packed of the pairs of a split.

    Args:
        row_length: tokens of the longest rows.
        index: what `tokenize` wrote.
        losses: counts what is left out.
    Raises:
        SnaketuneError: a pair longer than a row where `overflow` is `raise`.
    """
    pairs = _whole(index)
    pairs = _without(pairs, ~pairs.supervised(runs), "nothing_supervised", losses)
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
        return _without(pairs, too_long, "longer_than_row", losses)
    cut = _truncated(pairs, row_length)
    # Completions that differ only in what was cut off teach nothing.
    lost = too_long & (~cut.supervised(runs) | cut.equal)
    losses.drop("prompt_fills_row", int(lost.sum()), int(pairs.read[lost].sum()))
    losses.truncated_rows += int((too_long & ~lost).sum())
    losses.truncated_tokens += int((pairs.read - cut.read)[~lost].sum())
    return cut.take(~lost)


def _whole(index: pa.Table) -> Pairs:
    length, prompt, chosen, common, prompt_hash = (
        index[name].to_numpy() for name in ("length", "prompt", "chosen", "common", "prompt_hash")
    )
    sequence = np.arange(len(length), dtype=np.int32)
    return Pairs(
        sequence=sequence,
        second_sequence=sequence,
        second_start=prompt + chosen,
        prompt=prompt,
        first=chosen,
        second=length - prompt - chosen,
        common=common,
        prompt_hash=prompt_hash,
    )


def _without(pairs: Pairs, which: np.ndarray, reason: str, losses: Losses) -> Pairs:
    losses.drop(reason, int(which.sum()), int(pairs.read[which].sum()))
    return pairs.take(~which) if which.any() else pairs


def _truncated(pairs: Pairs, row_length: int) -> Pairs:
    """Completions cut to what prompt and common beginning leave of a row; a short one leaves more to the other."""
    shared = pairs.prompt + pairs.common
    room = np.maximum(row_length - shared, 0)
    first, second = pairs.first - pairs.common, pairs.second - pairs.common
    kept_first = np.minimum(first, np.maximum(room // 2, room - second))
    kept_second = np.minimum(second, room - kept_first)
    common = np.minimum(pairs.common, np.maximum(row_length - pairs.prompt, 0))
    return replace(pairs, first=common + kept_first, second=common + kept_second, common=common)
