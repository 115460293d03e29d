"""Excerpts of data for messages and records: cut short, with control characters escaped."""

import json
import sys
from typing import Any

from snaketune.errors import printable

EXCERPT_LENGTH = 200


def excerpt(value: Any) -> str:
    """Return the beginning of a value as JSON."""
    try:
        serialized = json.dumps(value, ensure_ascii=False, default=str)
    except (ValueError, TypeError, RecursionError):
        return "…"
    return serialized if len(serialized) <= EXCERPT_LENGTH else serialized[:EXCERPT_LENGTH] + "…"


def print_line(line: str) -> None:
    """Print a line that quotes data, with what standard output can't encode as escapes."""
    encoding = sys.stdout.encoding or "utf-8"
    print(printable(line).encode(encoding, "backslashreplace").decode(encoding), flush=True)
