"""Regular expressions of the config, with a limit on the time that they may take on one text."""

from collections.abc import Callable

import regex

SECONDS = 10.0


class TooSlow(Exception):
    """A pattern that backtracks without end on some text."""

    def __init__(self, pattern: str):
        super().__init__(
            f"the pattern {pattern!r} takes more than {SECONDS:.0f} s on this text; write it so that no part can match the "
            "same characters in two ways, as (a|aa)+ does"
        )


def search(pattern: str, text: str) -> regex.Match[str] | None:
    """Like `re.search`.

    Raises:
        TooSlow: the pattern takes too long.

    >>> search("Answer: (.*)", "Answer: 7")[1]
    '7'
    """
    return _in_time(regex.search, pattern, text)


def fullmatch(pattern: str, text: str) -> regex.Match[str] | None:
    """Like `re.fullmatch`; raises as `search` does."""
    return _in_time(regex.fullmatch, pattern, text)


def _in_time(match: Callable[..., regex.Match[str] | None], pattern: str, text: str) -> regex.Match[str] | None:
    try:
        return match(pattern, text, timeout=SECONDS)
    except TimeoutError:
        raise TooSlow(pattern) from None
