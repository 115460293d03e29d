"""Progress of long work: a line every few seconds, with rate and remaining time, that also reads well in a log file."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")
SECONDS_BETWEEN_LINES = 5.0


def progress(
    items: Iterable[T],
    what: str,
    unit: str,
    total: int | None = None,
    count: Callable[[T], int] = lambda item: 1,
    tokens: Callable[[T], int] | None = None,
) -> Iterator[T]:
    """Yield `items`, and print the progress every few seconds. Args: count, tokens: the numbers of units and of tokens of an
    item.

    >>> list(progress([1, 2], "adding", "numbers"))
    [1, 2]
    """
    started = last = time.monotonic()
    done = tokens_done = 0
    for item in items:
        yield item
        done += count(item)
        tokens_done += tokens(item) if tokens else 0
        now = time.monotonic()
        if now - last >= SECONDS_BETWEEN_LINES:
            last, rate = now, done / (now - started)
            of, remaining = (f"/{total}", f", {(total - done) / rate:.0f} s left") if total else ("", "")
            speed = f", {tokens_done / (now - started):.3g} tokens/s" if tokens else ""
            print(f"{what}: {done}{of} {unit}, {rate:.3g}/s{speed}{remaining}", file=sys.stderr, flush=True)
