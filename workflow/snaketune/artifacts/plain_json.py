"""JSON of results, which may come from elsewhere: parsed with limits that no stage reaches."""

import json
from typing import Any

from snaketune.config.secrets import nested

MAX_DIGITS, MAX_DEPTH = 20, 100


def parse_json(text: str | bytes) -> Any:
    """Parse JSON. ValueError for what isn't JSON, for integers too large for most functions, and for nesting too deep for
    recursive ones.

    >>> parse_json('{"a": [1, 2.5, null]}')
    {'a': [1, 2.5, None]}
    """
    too_deep = ValueError(f"lists and mappings are nested more than {MAX_DEPTH} deep")
    try:
        value = json.loads(text, parse_int=_bounded)
    except RecursionError:
        raise too_deep from None
    if any(len(keys) > MAX_DEPTH for keys, _ in nested(value)):
        raise too_deep
    return value


def _bounded(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"the integer {text[:MAX_DIGITS]}... has {len(text)} digits")
    return int(text)
