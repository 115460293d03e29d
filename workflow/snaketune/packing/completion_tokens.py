"""Completions spelled out, token by token with their supervision, so that one can see what they begin with alike."""

import numpy as np

from snaketune.packing.supervised_runs import Runs
from snaketune.tokenization.token_store import TokenParts

# Completions read before memory is given back to the system.
READ_BEFORE_RELEASE = 65536


class Spelling:
    """The sequences of a split, mapped."""

    def __init__(self, parts: TokenParts, split: str, runs: Runs):
        self._parts, self.runs = parts, runs
        views = parts.views(split)
        self._values = views.values
        self._batch, self._begin = views.places()
        self._read = 0

    def ids(self, sequence: int, start: int, tokens: int) -> np.ndarray:
        """int32[tokens], a view."""
        begin = self._begin[sequence] + start
        return self._values[self._batch[sequence]][begin : begin + tokens]

    def completion(self, sequence: int, start: int, tokens: int) -> bytes:
        """Four bytes for each token and whether it is supervised."""
        self._read += 1
        if self._read > READ_BEFORE_RELEASE:
            self._parts.release()
            self._read = 0
        spelled = self.ids(sequence, start, tokens) << 1
        low, high = self.runs.offsets[sequence : sequence + 2]
        edges = self.runs.values[low:high].tolist()
        for begin, end in zip(edges[::2], edges[1::2]):
            spelled[max(begin - start, 0) : max(end - start, 0)] |= 1
        return spelled.tobytes()


def common_tokens(a: bytes, b: bytes) -> int:
    """How many tokens two completions begin with, of which the same are supervised."""
    least = min(len(a), len(b)) // 4
    different = np.frombuffer(a, np.int32, least) != np.frombuffer(b, np.int32, least)
    first = int(different.argmax()) if least else 0
    return first if least and different[first] else least
