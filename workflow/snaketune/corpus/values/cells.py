"""Values of columns: as text, as number, as parsed JSON; and which columns of a row are read."""

import json
import math
import re
from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Any

from snaketune.corpus.excerpts import EXCERPT_LENGTH
from snaketune.corpus.rows import Malformed

Raw = dict[str, Any]

BLANK = re.compile(
    r"\s*(?:nan|none|null|n/?a|-+|true|false|[-+]?\d[\d.,]*(?:e[-+]?\d+)?|https?://\S+)?\s*", re.IGNORECASE
)
NUMBER_WITH_COMMA = re.compile(r"\s*[-+]?\d[\d.]*(?:,\d+)+\s*")


def flat(raw: Raw) -> Raw:
    """A row whose `input` holds messages, with what is beside them as columns."""
    inner = raw["input"]
    if "messages" not in inner or not inner.keys().isdisjoint(raw):
        return raw
    return {column: value for column, value in raw.items() if column != "input"} | inner


def column_of(raw: Raw, column: str) -> Any:
    """Return the value of a column. Raises Malformed if there is none."""
    if column not in raw:
        raise Malformed("missing_column", f"no column {column}, or it is null; {columns_of(raw)}")
    return raw[column]


def columns_of(raw: Raw) -> str:
    """Describe the columns of a row that aren't null, for messages."""
    columns = [column for column, value in raw.items() if value is not None]
    return f"the row has {', '.join(columns)}"[:EXCERPT_LENGTH] if columns else "the row has no column that isn't null"


def first_key(item: Mapping[str, Any], keys: Iterable[str]) -> str | None:
    """Return the first of `keys` that isn't null in `item`."""
    return next((key for key in keys if item.get(key) is not None), None)


def first_value(item: Mapping[str, Any], keys: Iterable[str]) -> Any:
    return next((value for key in keys if (value := item.get(key)) is not None), None)


def kind_of(value: Any) -> str:
    return "null" if value is None else type(value).__name__


def wrong_type(where: str, value: Any, expected: str = "a text") -> Malformed:
    return Malformed("wrong_type", f"{where} holds {kind_of(value)}, expected {expected}")


def plain_text(value: Any) -> str | None:
    """Return a text unchanged, and a number or boolean as text; None for anything else.

    >>> plain_text(51.0), plain_text(0.25), plain_text(True), plain_text([1])
    ('51', '0.25', 'true', None)
    """
    match value:
        case str():
            return value
        case bool():
            return str(value).lower()
        case int():
            return str(value)
        case float() if math.isfinite(value):
            return str(int(value)) if value.is_integer() and abs(value) < 2**53 else str(value)
    return None


def is_plain(value: Any) -> bool:
    return plain_text(value) is not None


def text_if_number(value: Any) -> Any:
    """Return a number as text, anything else unchanged.

    >>> text_if_number(3.0), text_if_number(True), text_if_number([3])
    ('3', True, [3])
    """
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return value
    text = plain_text(value)
    return value if text is None else text


def number_of(value: Any) -> float | None:
    """Return a rating as a number; None if it isn't one.

    Raises Malformed: it is infinite, or has a comma, which may separate thousands, or decimals.
    """
    if isinstance(value, str) and NUMBER_WITH_COMMA.fullmatch(value):
        raise Malformed(
            "ambiguous_number", f"{value.strip()[:40]!r} has a comma, which may separate thousands, or decimals"
        )
    if isinstance(value, bool) or not isinstance(value, (int, float, str, Decimal)):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    if math.isinf(number):
        raise Malformed("infinite_number", f"{value!r:.40} is no rating")
    return None if math.isnan(number) else number


def may_be_number(value: Any) -> bool:
    """Whether a value is a rating, also one that is ambiguous."""
    try:
        return number_of(value) is not None
    except Malformed:
        return True


def json_of(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def is_blank(value: Any) -> bool:
    """Return True if a cell holds no text for a prompt: null, an empty value, a number (also as text), or a link.

    >>> [is_blank(value) for value in (None, 4, "4", " nan", [], [1, 2], "https://a.b", "4 cats", ["a"], {"a": 1})]
    [True, True, True, True, True, True, True, False, False, False]
    """
    if isinstance(value, list):
        return all(item is None or isinstance(item, (bool, int, float)) for item in value)
    if isinstance(value, str):
        return BLANK.fullmatch(value) is not None
    return not value or isinstance(value, (bool, int, float))
