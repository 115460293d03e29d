"""Texts that end a response: when a row of a batch has one, and what is then its response."""

from bisect import bisect_left
from collections.abc import Callable, Sequence

import torch
from transformers import StoppingCriteria

Decode = Callable[[Sequence[int]], str]


def first_stop(text: str, stops: Sequence[str]) -> int | None:
    """Where the first of them begins.

    >>> first_stop("one. two\\n", ["\\n", ". "]), first_stop("one", ["."])
    (3, None)
    """
    return min((place for stop in stops if (place := text.find(stop)) >= 0), default=None)


def cut(new: list[int], decode: Decode, stops: Sequence[str]) -> tuple[str, int]:
    """What the tokens say before the first of the texts, and after how many of them that one was complete."""
    text = decode(new)
    place = first_stop(text, stops)
    if place is None:
        return text, len(new)
    ended = bisect_left(range(len(new)), True, key=lambda n: first_stop(decode(new[:n]), stops) is not None)
    return text[:place], ended


class StopOnText(StoppingCriteria):
    """Ends each row of a batch once its response holds one of the texts; the batch ends with its last row.

    Each step decodes the last few tokens of each row: as many as the longest text has bytes, since a token has at least one.
    What tokens without any text hide from that, `cut` finds in the end.
    """

    def __init__(self, decode: Decode, stops: Sequence[str], width: int):
        """Args: width: of the prompts."""
        self.decode, self.stops, self.width = decode, stops, width
        self.tail = max(len(stop.encode()) for stop in stops) + 1
        self.ended: set[int] = set()

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_) -> torch.Tensor:
        new_BN = input_ids[:, self.width :]
        for row, last in enumerate(new_BN[:, -self.tail :].tolist()):
            # Apart from the tokens before them, some tokenizers write the first of them otherwise.
            if row not in self.ended and self._is_in(last) and self._is_in(new_BN[row].tolist()):
                self.ended.add(row)
        return torch.tensor([row in self.ended for row in range(len(new_BN))], device=input_ids.device)

    def _is_in(self, ids: list[int]) -> bool:
        return first_stop(self.decode(ids), self.stops) is not None
