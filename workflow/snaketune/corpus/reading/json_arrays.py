"""Rows of one JSON document, read block by block: an array, an object that wraps one, or consecutive objects.

An array is cut at commas between its elements, which are found among the few bytes that structure JSON, without parsing. Each
chunk is then parsed strictly, so that a wrong guess about damaged JSON does no harm.

The other keys of an object around rows, such as a common context, are columns of each row.
"""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from snaketune.corpus.excerpts import print_line
from snaketune.corpus.reading.json_values import checked_row, first_malformed, parse_document
from snaketune.corpus.rows import Malformed, Noted, nan_as_null
from snaketune.errors import SnaketuneError

BLOCK = 1 << 20
# An object with a list in one of these columns is a row; any other object around one list wraps rows.
COLUMNS_OF_LISTS = {"messages", "conversations", "conversation", "turns", "instances", "replies", "chosen", "rejected"}
COLUMNS_OF_LISTS |= {"chosen_messages", "rejected_messages", "prompt", "completion", "trajectory", "context", "history"}
# Splits in one object: the one that is read, and those that aren't.
SPLIT = "train"
OTHER_SPLITS = {"test", "validation", "valid", "val", "dev", "eval", "evaluation"}

QUOTE, COMMA, OPEN, CLOSE = 1, 2, 3, 4
STRUCTURAL_BYTES = bytes(
    {34: QUOTE, 44: COMMA, 91: OPEN, 123: OPEN, 93: CLOSE, 125: CLOSE}.get(byte, 0) for byte in range(256)
)
DEPTH_CHANGES = np.array([0, 0, 0, 1, -1], np.int64)


class Structure(NamedTuple):
    """The bytes that structure a chunk of JSON: position, type, and depth after each."""

    positions: np.ndarray
    marks: np.ndarray
    depths: np.ndarray


def document_rows(file: BinaryIO, display_name: str, start: bytes) -> Iterator[Any]:
    """Yield the elements of an array, alone or in an object; consecutive objects; or the one value that the document is.

    An object larger than one block counts as a wrapper by its beginning, before its end is known, so its keys after the rows
    can't be columns of them. Of several arrays in an object, the one named `train` is read, and the others are logged.

    Args:
        start: a byte order mark, which is skipped.
    Raises:
        Malformed: not valid JSON.
        SnaketuneError: the object has another array after the first, or a text or object that belongs to the rows before it.
    """
    window = file.read(BLOCK)
    whole = len(window) < BLOCK
    window = window.removeprefix(start).lstrip()
    if window.startswith(b"["):
        rest = yield from _elements(file, window[1:])
        while rest:
            if not rest.isspace():
                raise Malformed("not_json", "there is text after the end of the array")
            rest = file.read(BLOCK)
        return
    before = None if whole else _array_prefix(window)
    if before is None and window.startswith(b"{"):
        yield from _objects(file, window, display_name)
        return
    if before is None:
        value, irregular = parse_document(window + file.read())
        yield checked_row(value) if irregular else value
        return
    beginning, _ = parse_document(before + b"[]}")
    rest = yield from _elements(file, window[len(before) + 1 :], _around_rows(beginning))
    wrapper, irregular = parse_document(before + b"[]" + rest + file.read())
    if irregular and first_malformed(wrapper):
        raise Malformed("not_json", "the object around the rows has a key twice")
    lists = {key: value for key, value in wrapper.items() if isinstance(value, list)}
    if next(iter(lists)) == SPLIT:
        _log_unread_splits(lists, display_name)
    elif len(lists) > 1:
        raise SnaketuneError(
            f"{display_name} holds several arrays ({', '.join(lists)[:200]}); write each to a file of its own, "
            f"or name one {SPLIT}"
        )
    after = {key: value for key, value in _around_rows(wrapper).items() if key not in beginning}
    if late := [key for key, value in after.items() if isinstance(value, dict) or len(str(value).split()) > 1]:
        what = f"{', '.join(late)[:200]} after the rows; move it before them, so that it is read with each row, or remove it"
        raise SnaketuneError(f"{display_name} is an object around rows, with {what}")
    if after:
        print_line(f"{display_name}: not read: {', '.join(after)}, after the rows")


def _objects(file: BinaryIO, window: bytes, display_name: str) -> Iterator[Any]:
    """Yield the rows of the object that `window` begins with; or, if more objects follow without a comma, these objects."""
    number = 0
    while True:
        structure = _structure(window)
        ends = (structure.positions[(structure.depths == 0) & (structure.marks == CLOSE)] + 1).tolist()
        alone = not number and len(ends) == 1 and not window[ends[0] :].strip()
        if not ends or alone:
            # The window doubles each time, as for elements of an array.
            more = file.read(max(BLOCK, len(window)))
            if more:
                window += more
                continue
            if window.strip():
                try:
                    document, irregular = parse_document(window)
                except Malformed as error:
                    row = f"row {number + 1}: " if number else ""
                    raise Malformed(error.reason, f"{row}{error.detail}", error.excerpt) from None
                rows = _rows_of(document, display_name)
                yield from map(checked_row, rows) if irregular else rows
            return
        chunks = [window[start:end] for start, end in zip([0, *ends], ends)]
        commas = np.cumsum([len(chunk) + 1 for chunk in chunks[:-1]]) - 1
        yield from _parsed(b",".join(chunks), commas, number)
        number += len(chunks)
        window = window[ends[-1] :] + file.read(BLOCK)


def _elements(file: BinaryIO, window: bytes, around: Mapping[str, Any] = MappingProxyType({})) -> Iterator[Any]:
    """Yield the elements of an array that `window` begins within, each with the columns `around`; return what was read beyond
    its end."""
    number = 0
    while True:
        structure = _structure(window)
        ends = np.flatnonzero((structure.depths == 0) & (structure.marks == COMMA))
        closing = np.flatnonzero(structure.depths < 0)[:1]
        if closing.size:
            ends = ends[ends < closing[0]]
            end = int(structure.positions[closing[0]])
        elif ends.size:
            end = int(structure.positions[ends[-1]])
        else:
            # The window doubles each time, so that an element of many blocks is scanned only a few times.
            more = file.read(max(BLOCK, len(window)))
            if not more:
                raise Malformed("not_json", f"it ends within row {number + 1}")
            window += more
            continue
        if number or ends.size or window[:end].strip():
            for row in _parsed(window[:end], structure.positions[ends], number):
                number += 1
                yield _with_columns(row, around)
        if closing.size:
            if window[end : end + 1] != b"]":
                raise Malformed("not_json", f"after row {number}, a brace closes the array")
            return window[end + 1 :]
        window = window[end + 1 :] + file.read(BLOCK)


def _parsed(chunk: bytes, commas: np.ndarray, before: int) -> Iterator[Any]:
    """Yield the elements in a chunk of an array, parsed together; `before` is the number of elements before it."""
    try:
        rows, irregular = parse_document(b"[" + chunk + b"]")
        if not rows:
            raise Malformed("not_json", "an element is missing")
    except Malformed:
        start = 0
        for number, end in enumerate((*commas[commas < len(chunk)].tolist(), len(chunk)), start=before + 1):
            try:
                parse_document(chunk[start:end])
            except Malformed as error:
                raise Malformed(error.reason, f"row {number}: {error.detail}", error.excerpt) from None
            start = end + 1
        raise
    return map(checked_row, rows) if irregular else iter(rows)


def _structure(text: bytes) -> Structure:
    r"""Return the structure of a chunk of JSON that begins outside of any string.

    >>> _structure(rb'{"a": "[\"{"}, 3').depths.tolist()
    [1, 1, 1, 1, 1, 0, 0]
    """
    if b"\\" in text:
        # Two backslashes are one, and don't escape what follows; replaced by as many bytes, so that positions stay
        # valid.
        text = text.replace(b"\\\\", b"__").replace(b'\\"', b"__")
    codes = np.frombuffer(text.translate(STRUCTURAL_BYTES), np.uint8)
    positions = np.flatnonzero(codes)
    marks = codes[positions]
    outside = np.cumsum(marks == QUOTE) % 2 == 0
    structural = outside | (marks == QUOTE)
    positions, marks = positions[structural], marks[structural]
    return Structure(positions, marks, np.cumsum(DEPTH_CHANGES[marks]))


def _array_prefix(window: bytes) -> bytes | None:
    """Return the text before the array of an object that wraps rows; None if `window` isn't such an object."""
    if not window.startswith(b"{"):
        return None
    structure = _structure(window)
    opening = structure.positions[(structure.depths == 2) & (structure.marks == OPEN)]
    first = next((position for position in opening if window[position] == ord("[")), None)
    if first is None:
        return None
    before = window[:first]
    try:
        document, _ = parse_document(before + b"[]}")
    except Malformed:
        return None
    last = list(document)[-1] if isinstance(document, dict) else None
    if last is None or last in COLUMNS_OF_LISTS or last in OTHER_SPLITS:
        return None
    return before if window[len(before) + 1 :].lstrip().startswith(b"{") else None


def _rows_of(document: Any, display_name: str) -> list[Any]:
    """Return the rows of a document: the elements of an array, alone or in an object, or the value itself."""
    if isinstance(document, dict):
        arrays = {key: value for key, value in document.items() if isinstance(value, list)}
        alone = len(arrays) == 1
        key = next(iter(arrays)) if alone else SPLIT
        array = arrays.get(key)
        holds_rows = (array or alone) and all(isinstance(item, (dict, Malformed)) for item in array)
        if holds_rows and key not in COLUMNS_OF_LISTS:
            _log_unread_splits(arrays, display_name)
            around = _around_rows(document)
            return [_with_columns(row, around) for row in array]
    return document if isinstance(document, list) else [document]


def _around_rows(wrapper: dict[str, Any]) -> dict[str, Any]:
    """Return what an object holds beside arrays."""
    return {
        key: nan_as_null(value)
        for key, value in wrapper.items()
        if value not in ("", None, {}) and type(value) is not list
    }


def _with_columns(row: Any, around: Mapping[str, Any]) -> Any:
    """Return a row with further columns; where it has a column of that name, the other is `NAME (around the rows)`."""
    if isinstance(row, Noted):
        return row._replace(value=_with_columns(row.value, around))
    if not around or type(row) is not dict:
        return row
    return {f"{key} (around the rows)" if key in row else key: value for key, value in around.items()} | row


def _log_unread_splits(arrays: dict[str, list[Any]], display_name: str) -> None:
    others = [f"{key} ({len(array)} rows)" for key, array in arrays.items() if key != SPLIT]
    if SPLIT in arrays and others:
        print_line(f"{display_name}: of its splits, {SPLIT} is read; not read: {', '.join(others)}")
