"""Bytes to a JSON value: fast where all is well, exact about what is wrong where it isn't.

orjson parses at some 500 MB/s, but takes the last of two equal keys without a word and rounds integers of 64 bits and
more. Both are looked for, and the json module has the last word wherever orjson refuses or one of them may be there. It
reads a bare NaN too, which Python's writers spell a missing number as, and which is null here.
"""

import json
import math
from typing import Any

import orjson

from snaketune.corpus.excerpts import EXCERPT_LENGTH, excerpt
from snaketune.corpus.raw_rows import without_nan
from snaketune.corpus.reading.encodings import advice
from snaketune.corpus.rows import Malformed

MAX_EXACT = 2**63


def parse(data: bytes) -> Any:
    """The value that `data` spells; Noted if a NaN in it became null.

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
    """The value, and whether a key stands twice somewhere in it, or a NaN: the parts of such a value have to be `marked`.

    Raises:
        Malformed: not UTF-8 or not JSON.
    """
    try:
        value = orjson.loads(data)
        keys = _count_keys(value)
        # Every key has its colon; mostly, no text has one more.
        if keys == data.count(b":") or keys == _max_keys(data):
            return value, False
    except (ValueError, OverflowError, RecursionError):
        pass
    return _parse_strictly(data)


def checked_row(row: Any) -> Any:
    """`row`; what is wrong with it where a key stands twice in it; without the NaN in it, and Noted."""
    return first_malformed(row) or without_nan(row)


def first_malformed(value: Any) -> Malformed | None:
    """The first object with a key twice in a value of `parse_document`, where it is a Malformed."""
    pending = [value]
    while pending:
        value = pending.pop()
        if isinstance(value, Malformed):
            return value
        if isinstance(value, (dict, list)):
            pending.extend(reversed(value.values() if isinstance(value, dict) else value))
    return None


def _count_keys(value: Any) -> int:
    """How many keys a value has at all depths. OverflowError if a number may be an integer that was rounded."""
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
    r"""An upper bound of the keys that valid JSON spells, and almost always their number.

    A key ends on a quote before a colon. Within a text that quote has a backslash before it, and a key's own quote has
    one only if that backslash is itself escaped, so two of them count again. Any space before a colon counts too.

    >>> _max_keys(rb'{"a": "x \": y", "b\\": 2, "c" : 3}')
    3
    """
    count = data.count(b'":') + data.count(b" :")
    if b"\\" in data:
        count += data.count(b'\\\\":') - data.count(b'\\":')
    # These stand between tokens only, and in most lines nowhere.
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
        return Malformed("duplicate_key", f"the key {key[:40]!r} stands twice in one object", excerpt(result))

    def constant_of(literal: str) -> float:
        nonlocal irregular
        if literal != "NaN":
            raise ValueError(f"{literal} is no JSON")
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
    else:
        return value, irregular
    raise Malformed(reason, detail, data[: 4 * EXCERPT_LENGTH].decode(errors="backslashreplace")[:EXCERPT_LENGTH])
