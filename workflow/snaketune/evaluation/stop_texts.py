"""Stop texts: detection during generation, and truncation of responses."""

from bisect import bisect_left
from collections.abc import Callable, Sequence

import torch
from transformers import StoppingCriteria

Decode = Callable[[Sequence[int]], str]


def first_stop(text: str, stops: Sequence[str]) -> int | None:
    """Return the offset of the earliest stop text in `text`; None if there is none.

    >>> first_stop("one. two\\n", ["\\n", ". "]), first_stop("one", ["."])
    (3, None)
    """
    return min((position for stop in stops if (position := text.find(stop)) >= 0), default=None)


def cut(new: list[int], decode: Decode, stops: Sequence[str]) -> tuple[str, int]:
    """Return the decoded text before the earliest stop text, and the number of tokens up to the end of that stop text."""
    text = decode(new)
    offset = first_stop(text, stops)
    if offset is None:
        return text, len(new)
    ended = bisect_left(range(len(new)), True, key=lambda n: first_stop(decode(new[:n]), stops) is not None)
    return text[:offset], ended


class StopOnText(StoppingCriteria):
    """Stopping criterion per row: the response contains a stop text.

    Each step decodes the last few tokens of each row: as many as the longest stop text has bytes, since a token has at least
    one byte. A stop text that this misses, because of tokens without text, is found by `cut` after generation.
    """

    def __init__(self, decode: Decode, stops: Sequence[str], width: int):
        """Args: width: width of the padded prompts in tokens."""
        self.decode, self.stops, self.width = decode, stops, width
        self.tail = max(len(stop.encode()) for stop in stops) + 1
        self.ended: set[int] = set()

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_) -> torch.Tensor:
        new_BN = input_ids[:, self.width :]
        for row, last in enumerate(new_BN[:, -self.tail :].tolist()):
            # Confirmed on the whole response, since some tokenizers decode a token differently without those before it.
            if row not in self.ended and self._is_in(last) and self._is_in(new_BN[row].tolist()):
                self.ended.add(row)
        return torch.tensor([row in self.ended for row in range(len(new_BN))], device=input_ids.device)

    def _is_in(self, ids: list[int]) -> bool:
        return first_stop(self.decode(ids), self.stops) is not None
