"""The error that is shown to the user as a message without a traceback, and text as messages show it."""

import json


class SnaketuneError(Exception):
    """Invalid input, a damaged artifact or an impossible request.

    The message names the file, line or key, says what was found there, and what to do about it.
    """


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or the error's type if it has no message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def printable(text: str) -> str:
    r"""Escape control characters and other unprintable ones as JSON does, because terminals interpret some of them.

    >>> printable("a\x1b[31m\x9b")
    'a\\u001b[31m\\u009b'
    """
    return text if text.isprintable() else "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text)
