"""Bytes to a JSON value: fast where all is well, exact about what is wrong where it isn't.

orjson parses at some 500 MB/s, but takes the last of two equal keys without a word and rounds integers of 64 bits and
more. Both are looked for, and the json module has the last word wherever orjson refuses or one of them may be there.
"""

import json
from typing import Any

import orjson

from snaketune.corpus.excerpts import EXCERPT_LENGTH, excerpt
from snaketune.corpus.rows import Malformed

LARGEST_EXACT = 2**63


def parse(data: bytes) -> Any:
    """The value that `data` spells.

    Raises:
        Malformed: not UTF-8, not JSON (NaN and Infinity aren't), or an object with the same key twice.
    """
    value, twice = parse_document(data)
    if twice:
        raise malformed_in(value)
    return value


def parse_document(data: bytes) -> tuple[Any, bool]:
    """The value, and whether a key stands twice somewhere in it: such an object is a Malformed in the value.

    Raises:
        Malformed: not UTF-8 or not JSON.
    """
    try:
        value = orjson.loads(data)
        keys = _keys(value)
        # Every key has its colon; mostly, no text has one more.
        if keys == data.count(b":") or keys == _keys_at_most(data):
            return value, False
    except (ValueError, OverflowError, RecursionError):
        pass
    return _parse_slowly(data)


def malformed_in(value: Any) -> Malformed | None:
    """The first object with a key twice in a value of `parse_document`."""
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Malformed):
            return value
        if isinstance(value, (dict, list)):
            waiting.extend(reversed(value.values() if isinstance(value, dict) else value))
    return None


def _keys(value: Any) -> int:
    """How many keys a value has at all depths. OverflowError if a number may be an integer that was rounded."""
    if type(value) is dict:
        found, inner = len(value), value.values()
    elif type(value) is list:
        found, inner = 0, value
    else:
        found, inner = 0, (value,)
    for item in inner:
        kind = type(item)
        if kind is dict or kind is list:
            found += _keys(item)
        elif kind is float and not -LARGEST_EXACT < item < LARGEST_EXACT:
            raise OverflowError
    return found


def _keys_at_most(data: bytes) -> int:
    r"""An upper bound of the keys that valid JSON spells, and almost always their number.

    A key ends on a quote before a colon. Within a text that quote has a backslash before it, and a key's own quote has
    one only if that backslash is itself escaped, so two of them count again. Any space before a colon counts too.

    >>> _keys_at_most(rb'{"a": "x \": y", "b\\": 2, "c" : 3}')
    3
    """
    found = data.count(b'":') + data.count(b" :")
    if b"\\" in data:
        found += data.count(b'\\\\":') - data.count(b'\\":')
    # These stand between tokens only, and in most lines nowhere.
    return found + sum(data.count(space + b":") for space in (b"\t", b"\n", b"\r") if space in data)


def _parse_slowly(data: bytes) -> tuple[Any, bool]:
    twice = False

    def object_of(pairs: list[tuple[str, Any]]) -> Any:
        nonlocal twice
        made = dict(pairs)
        if len(made) == len(pairs):
            return made
        twice = True
        seen: set[str] = set()
        key = next(key for key, _ in pairs if key in seen or seen.add(key))
        return Malformed("duplicate_key", f"the key {key[:40]!r} stands twice in one object", excerpt(made))

    try:
        value = json.loads(data.decode(), parse_constant=_refuse, object_pairs_hook=object_of)
    except UnicodeDecodeError as error:
        reason, detail = "not_utf8", f"byte {error.start + 1} isn't UTF-8 ({error.reason})"
    except RecursionError:
        reason, detail = "not_json", "nested too deeply"
    except ValueError as error:
        reason, detail = "not_json", str(error)
    else:
        return value, twice
    raise Malformed(reason, detail, data[: 4 * EXCERPT_LENGTH].decode(errors="backslashreplace")[:EXCERPT_LENGTH])


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")
