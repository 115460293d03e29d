"""Regular expressions of the config, with a limit on the time that they may take on one text."""

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
    try:
        return regex.search(pattern, text, timeout=SECONDS)
    except TimeoutError:
        raise TooSlow(pattern) from None
