"""Bytes to a JSON value: fast for valid JSON, with an exact reason for malformed JSON.

orjson parses about 500 MB/s, but silently takes the last of two equal keys and rounds integers of 64 bits and more. The json
module parses again where orjson fails or one of them may be present. It also reads a bare NaN, which becomes null here.
"""

import json
import math
import re
from typing import Any

import orjson

from snaketune.corpus.excerpts import EXCERPT_LENGTH, excerpt
from snaketune.corpus.reading.encodings import advice
from snaketune.corpus.rows import Malformed, Noted, leaves, nan_as_null

MAX_EXACT = 2**63
PYTHON_REPR = re.compile(rb"\s*\[?\s*\{\s*'")


def parse(data: bytes) -> Any:
    """Parse `data`; return Noted if a NaN in it became null.

    Raises:
        Malformed: not UTF-8, not JSON (Infinity isn't), or an object with the same key twice.
    """
    value, irregular = parse_document(data)
    if irregular:
        value = checked_row(value)
        if isinstance(value, Malformed):
            raise value
    return value


def parse_document(data: bytes) -> tuple[Any, bool]:
    """Parse `data`; return its value, and whether it has a duplicate key or a NaN: then each row in it needs `checked_row`.

    Raises:
        Malformed: not UTF-8 or not JSON.
    """
    try:
        value = orjson.loads(data)
        keys = _count_keys(value)
        # Every key has a colon; most texts have none.
        if keys == data.count(b":") or keys == _max_keys(data):
            return value, False
    except (ValueError, OverflowError, RecursionError):
        pass
    return _parse_strictly(data)


def checked_row(row: Any) -> Any:
    """Return `row`; the Malformed in it if a key is there twice; or Noted, with nulls for NaN."""
    if malformed := first_malformed(row):
        return malformed
    cleaned = nan_as_null(row)
    return row if cleaned is row else Noted(cleaned)


def first_malformed(value: Any) -> Malformed | None:
    """Return the first Malformed (an object with a duplicate key) in a value of `parse_document`; None if there is none."""
    return next((leaf for leaf in leaves(value) if isinstance(leaf, Malformed)), None)


def _count_keys(value: Any) -> int:
    """Count the keys of a value at all depths. Raises OverflowError if a number may be an integer that was rounded."""
    if type(value) is dict:
        count, inner = len(value), value.values()
    elif type(value) is list:
        count, inner = 0, value
    else:
        count, inner = 0, (value,)
    for item in inner:
        kind = type(item)
        if kind is dict or kind is list:
            count += _count_keys(item)
        elif kind is float and not -MAX_EXACT < item < MAX_EXACT:
            raise OverflowError
    return count


def _max_keys(data: bytes) -> int:
    r"""Return an upper bound of the number of keys in valid JSON, which is nearly always exact.

    A key ends on a quote before a colon. Within a text that quote has a backslash before it, and a key's own quote has
    one only if that backslash is itself escaped, so two of them count again. Any space before a colon counts too.

    >>> _max_keys(rb'{"a": "x \": y", "b\\": 2, "c" : 3}')
    3
    """
    count = data.count(b'":') + data.count(b" :")
    if b"\\" in data:
        count += data.count(b'\\\\":') - data.count(b'\\":')
    # These occur between tokens only, and in most lines not at all.
    return count + sum(data.count(space + b":") for space in (b"\t", b"\n", b"\r") if space in data)


def _parse_strictly(data: bytes) -> tuple[Any, bool]:
    irregular = False

    def object_of(pairs: list[tuple[str, Any]]) -> Any:
        nonlocal irregular
        result = dict(pairs)
        if len(result) == len(pairs):
            return result
        irregular = True
        seen: set[str] = set()
        key = next(key for key, _ in pairs if key in seen or seen.add(key))
        return Malformed("duplicate_key", f"the key {key[:40]!r} is twice in one object", excerpt(result))

    def constant_of(literal: str) -> float:
        nonlocal irregular
        if literal != "NaN":
            raise ValueError(f"{literal} isn't valid JSON")
        irregular = True
        return math.nan

    try:
        value = json.loads(data.decode(), parse_constant=constant_of, object_pairs_hook=object_of)
    except UnicodeDecodeError as error:
        reason, detail = "not_utf8", f"byte {error.start + 1} isn't UTF-8 ({error.reason}); {advice(data)}"
    except RecursionError:
        reason, detail = "not_json", "nested too deeply"
    except ValueError as error:
        reason, detail = "not_json", str(error)
        if PYTHON_REPR.match(data):
            what = (
                "texts are in single quotes, as Python prints them; write the row with json.dumps, not with str or repr"
            )
            reason, detail = "python_repr", f"{what} ({detail})"
    else:
        return value, irregular
    raise Malformed(reason, detail, data[: 4 * EXCERPT_LENGTH].decode(errors="backslashreplace")[:EXCERPT_LENGTH])
