"""Regular expressions from the config, with a limit on the time of one match."""

from collections.abc import Callable

import regex

SECONDS = 10.0


class TooSlow(Exception):
    """A pattern that backtracks exponentially on some text."""

    def __init__(self, pattern: str):
        super().__init__(
            f"the pattern {pattern!r} takes more than {SECONDS:.0f} s on this text; write it so that no part can match the "
            "same characters in two ways, as (a|aa)+ does"
        )


def search(pattern: str, text: str) -> regex.Match[str] | None:
    """Search like `re.search`.

    Raises:
        TooSlow: the search takes longer than SECONDS.

    >>> search("Answer: (.*)", "Answer: 7")[1]
    '7'
    """
    return _in_time(regex.search, pattern, text)


def search_last(pattern: str, text: str) -> regex.Match[str] | None:
    """The last match; raises as `search` does.

    >>> search_last("Score: ([0-9])", "Score: 3, no: Score: 4")[1]
    '4'
    """
    return _in_time(_last, pattern, text)


def _last(pattern: str, text: str, timeout: float) -> regex.Match[str] | None:
    return max(regex.finditer(pattern, text, timeout=timeout), key=lambda match: match.start(), default=None)


def fullmatch(pattern: str, text: str) -> regex.Match[str] | None:
    """Match like `re.fullmatch`; raises as `search` does."""
    return _in_time(regex.fullmatch, pattern, text)


def _in_time(match: Callable[..., regex.Match[str] | None], pattern: str, text: str) -> regex.Match[str] | None:
    try:
        return match(pattern, text, timeout=SECONDS)
    except TimeoutError:
        raise TooSlow(pattern) from None
