"""Rows of one JSON document: an array, an object that wraps one, or consecutive objects. A row at a time is in memory.

An object is read twice: what it holds beside its list of rows, such as a common context, are columns of each row.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from snaketune.corpus.excerpts import print_line
from snaketune.corpus.reading.formats import Opener
from snaketune.corpus.reading.json_text import BLOCK, JsonText
from snaketune.corpus.rows import Malformed, nan_as_null
from snaketune.errors import SnaketuneError

# An object with a list in one of these columns is a row; any other object around one list wraps rows.
COLUMNS_OF_LISTS = {"messages", "conversations", "conversation", "turns", "instances", "replies", "chosen", "rejected"}
COLUMNS_OF_LISTS |= {"chosen_messages", "rejected_messages", "prompt", "completion", "trajectory", "context", "history"}
# Of several lists in one object, the one that is read.
SPLIT = "train"


class Wrapper(NamedTuple):
    """An object around rows: the key of their list, and what else it holds, without other lists."""

    key: str
    around: dict[str, Any]


def document_rows(opener: Opener, display_name: str) -> Iterator[Any]:
    """Yield the elements of an array, alone or in an object; consecutive objects; or the one value that the document is.

    An object wraps rows if it has one list, or several of which one is `train`, and that holds objects. The others are logged.

    Raises:
        Malformed: not valid JSON.
    """
    with opener() as file:
        text = JsonText(file)
        first = text.next()
        if first == "[":
            yield from text.elements()
            if text.next():
                raise Malformed("not_json", "there is text after the end of the array")
            return
        wrapper = _wrapper(text, display_name) if first == "{" else None
    with opener() as file:
        text = JsonText(file)
        if wrapper:
            for key in text.members():
                if key == wrapper.key:
                    yield from (_with_columns(row, wrapper.around) for row in text.elements())
                    return
                text.value()
        number = 0
        while text.next():
            yield text.value(f"row {number + 1}" if number else "")
            number += 1


def _wrapper(text: JsonText, display_name: str) -> Wrapper | None:
    """Return what the object that is next in a text wraps its rows in; None if it is a row itself, or isn't valid."""
    around: dict[str, Any] = {}
    # The number of elements by list, and the lists that hold no rows.
    lengths: dict[str, int] = {}
    columns: set[str] = set()
    try:
        for key in text.members():
            if key in around or key in lengths:
                raise Malformed("not_json", f"the object around the rows has the key {key[:40]!r} twice")
            if text.next() != "[" or key in COLUMNS_OF_LISTS:
                value = text.value()
                if isinstance(value, Malformed):
                    raise value
                if isinstance(value, list):
                    lengths[key] = len(value)
                    columns.add(key)
                else:
                    around[key] = value
                continue
            lengths[key] = 0
            for row in text.elements():
                lengths[key] += 1
                if not isinstance(row, (dict, Malformed)):
                    columns.add(key)
    except Malformed:
        if lengths.keys() - columns:
            raise
        return None
    rows = [name for name in lengths if name not in columns]
    if len(rows) > 1 and SPLIT not in rows and text.size > BLOCK:
        raise SnaketuneError(
            f"{display_name} holds several arrays ({', '.join(rows)[:200]}); write each to a file of its own, "
            f"or name one {SPLIT}"
        )
    key = SPLIT if len(lengths) > 1 else next(iter(lengths), SPLIT)
    if key not in rows or (not lengths[key] and len(lengths) > 1):
        return None
    if found := text.next():
        if found == "{":
            return None
        raise Malformed("not_json", "there is text after the object around the rows")
    if others := [f"{other} ({length} rows)" for other, length in lengths.items() if other != key]:
        print_line(f"{display_name}: of its splits, {SPLIT} is read; not read: {', '.join(others)}")
    return Wrapper(key, {name: nan_as_null(value) for name, value in around.items() if value not in ("", None, {})})


def _with_columns(row: Any, around: dict[str, Any]) -> Any:
    """Return a row with further columns; where it has a column of that name, the other is `NAME (around the rows)`."""
    if not around or type(row) is not dict:
        return row
    return {f"{key} (around the rows)" if key in row else key: value for key, value in around.items()} | row
