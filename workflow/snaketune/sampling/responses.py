"""Responses to prompts, what identifies them, their batches, and their cache."""

import hashlib
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from snaketune.stages.cache.row_store import RowStore
from snaketune.stages.cache.work_folders import WorkFolder

Ended = Literal["stop", "length"]
Decode = Callable[[Sequence[int]], str]


class Response(NamedTuple):
    """A response without special tokens; its token ids, the stop token included; what ended it, a stop token or text, or
    `max_new_tokens`; and the sum of the tokens' log-probabilities under the model, at temperature 1 and without penalties (None
    if a server returns none)."""

    text: str
    tokens: list[int]
    ended: Ended
    logp: float | None


@dataclass(frozen=True)
class Request:
    """One response that is wanted: the `index`-th, from 0, to a prompt, int32[n]."""

    prompt: np.ndarray
    index: int = 0

    @cached_property
    def digest(self) -> bytes:
        """Identifies prompt and index: 16 bytes."""
        return hashlib.sha256(f"{self.index} ".encode() + self.prompt.astype("<i4").tobytes()).digest()[:16]

    def seed(self, seed: int) -> bytes:
        """32 bytes that determine the response's random numbers. Args: seed: of the decoding parameters."""
        return hashlib.sha256(f"{seed} ".encode() + self.digest).digest()


def batches(prompts: Iterable[np.ndarray], responses: int, batch_size: int) -> list[list[Request]]:
    """Batches of all responses to distinct prompts, int32[n] each, of similar length, those to a prompt next to each other.

    A response doesn't depend on its batch except for rounding. Batches follow from prompts and their number alone, and are
    computed as a whole, so any number of parts and any interruption give the same bits.

    >>> [[(request.prompt.tolist(), request.index) for request in batch]
    ...  for batch in batches([np.array([7, 8]), np.array([9]), np.array([9])], responses=2, batch_size=3)]
    [[([9], 0), ([9], 1)], [([7, 8], 0), ([7, 8], 1)]]
    """
    distinct = {Request(prompt).digest: prompt for prompt in prompts}
    ordered = [prompt for _, prompt in sorted(distinct.items(), key=lambda item: (len(item[1]), item[0]))]
    per_batch, per_prompt = max(1, batch_size // responses), min(responses, batch_size)
    return [
        [Request(prompt, index) for prompt in ordered[at : at + per_batch] for index in range(first, last)]
        for at in range(0, len(ordered), per_batch)
        for first in range(0, responses, per_prompt)
        for last in [min(first + per_prompt, responses)]
    ]


class Engine(Protocol):
    """What generates responses."""

    def identity(self) -> dict[str, Any]:
        """What affects a response besides weights, tokenizer, prompt and decoding parameters; part of the cache key."""

    def about(self) -> dict[str, Any]:
        """Name, version and settings, for the manifest."""

    def run(self) -> dict[str, Any]:
        """What run.json says of this attempt: a server's address, requests and tokens."""

    def generate(self, wanted: Sequence[Sequence[Request]]) -> Iterator[dict[bytes, Response]]:
        """Yield the responses to batches of requests as they are finished, by digest."""


class ResponseCache:
    """Responses by digest of their request (`known`), kept as rows of one key: the digest of everything else that affects
    them."""

    def __init__(self, work: WorkFolder, engine: Engine, parts: dict[str, Any]):
        """Args: parts: of the key besides the engine."""
        self.rows = RowStore(work.root, parts | {"engine": engine.identity()})
        self.rows.mark(work)
        self.rows.must_keep = engine.identity()["name"] == "server"
        self.engine = engine
        self.known: dict[bytes, Response] = {}

    def complete(self, wanted: Sequence[Sequence[Request]]) -> tuple[int, int]:
        """Generate the responses that aren't cached, a file of rows per finished batch; return their number, and that of their
        tokens."""

        def generated(missing: list[bytes]) -> Iterator[dict[bytes, Response]]:
            needed = set(missing)
            batches = [[request for request in batch if request.digest in needed] for batch in wanted]
            return self.engine.generate([batch for batch in batches if batch])

        digests = (request.digest for batch in wanted for request in batch if request.digest not in self.known)
        rows, missing = self.rows.completed(digests, generated, "responses")
        self.known |= {digest: Response(*row) for digest, row in rows.items()}
        return len(missing), sum(len(self.known[digest].tokens) for digest in missing)


def first_stop(text: str, stops: Sequence[str]) -> int | None:
    """The offset of the earliest stop text in `text`; None if there is none.

    >>> first_stop("one. two\\n", ["\\n", ". "]), first_stop("one", ["."])
    (3, None)
    """
    return min((position for stop in stops if (position := text.find(stop)) >= 0), default=None)


def cut(new: list[int], decode: Decode, stops: Sequence[str]) -> tuple[str, int, bool]:
    """The decoded text before the earliest stop text, the number of tokens up to the end of that stop text, and whether there
    is one."""
    text = decode(new)
    offset = first_stop(text, stops)
    if offset is None:
        return text, len(new), False
    ended = bisect_left(range(len(new)), True, key=lambda n: first_stop(decode(new[:n]), stops) is not None)
    return text[:offset], ended, True


def tokens_in(responses: dict[bytes, Response]) -> int:
    return sum(len(response.tokens) for response in responses.values())
