"""What messages and records quote of the data: cut short, and without what a terminal would obey."""

import json
import sys
from typing import Any

EXCERPT_LENGTH = 200


def excerpt(value: Any) -> str:
    """The beginning of any value as JSON, for people."""
    try:
        serialized = json.dumps(value, ensure_ascii=False, default=str)
    except (ValueError, TypeError, RecursionError):
        return "…"
    return serialized if len(serialized) <= EXCERPT_LENGTH else serialized[:EXCERPT_LENGTH] + "…"


def printable(text: str) -> str:
    r"""Control characters and all else that doesn't show, as the escapes that JSON has for them.

    A terminal would obey some of them, wherever they came from.

    >>> printable("a\x1b[31m\x9b")
    'a\\u001b[31m\\u009b'
    """
    return text if text.isprintable() else "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text)


def say(line: str) -> None:
    """Print a line that quotes the data, on whatever standard output there is."""
    encoding = sys.stdout.encoding or "utf-8"
    print(printable(line).encode(encoding, "backslashreplace").decode(encoding), flush=True)
