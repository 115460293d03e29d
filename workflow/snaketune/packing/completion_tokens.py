"""Tokens of completions with their supervision, as comparable byte strings, to find the tokens that completions share."""

import numpy as np

from snaketune.packing.supervised_runs import SupervisedRuns
from snaketune.tokenization.token_store import TokenParts

# Completions to read before mapped memory is released.
READ_BEFORE_RELEASE = 65536


class CompletionTokens:
    """The memory-mapped tokens of a split's sequences."""

    def __init__(self, parts: TokenParts, split: str, runs: SupervisedRuns):
        self._parts, self.runs = parts, runs
        views = parts.views(split)
        self._values = views.values
        self._batch, self._begin = views.locations()
        self._read = 0

    def ids(self, sequence: int, start: int, tokens: int) -> np.ndarray:
        """Return int32[tokens], a view."""
        begin = self._begin[sequence] + start
        return self._values[self._batch[sequence]][begin : begin + tokens]

    def key(self, sequence: int, start: int, tokens: int) -> bytes:
        """Return four bytes per token: its id and whether it is supervised."""
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
    """Return the number of leading tokens that are equal in id and supervision, given two keys of `CompletionTokens`."""
    least = min(len(a), len(b)) // 4
    different = np.frombuffer(a, np.int32, least) != np.frombuffer(b, np.int32, least)
    first = int(different.argmax()) if least else 0
    return first if least and different[first] else least
