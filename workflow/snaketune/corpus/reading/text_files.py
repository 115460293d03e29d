"""CSV files and files of one document each to raw rows.

Bytes that aren't UTF-8 become lone surrogates, so that they make one row malformed instead of failing the file. A long document
is cut, so that no file of a gigabyte has to be in memory: after a blank line, else a line, else a word. Each chunk is a row.
"""

import csv
import io
from collections.abc import Iterator
from itertools import chain

from snaketune.corpus.excerpts import EXCERPT_LENGTH
from snaketune.corpus.reading.encodings import advice
from snaketune.corpus.reading.formats import (
    DEFAULT_KEYS,
    DELIMITER_LINE,
    HEAD_LENGTH,
    Opener,
    TextKeys,
    csv_delimiter,
    suffix_of,
)
from snaketune.corpus.rows import TEXT, Dropped, Malformed, RawRow
from snaketune.errors import SnaketuneError

MAX_CELL_LENGTH = 2**31 - 1
# Rows after a damaged record that may be part of it, until a line closes its quote.
MAX_HELD = 10
# Two batches of rows of this length, at four bytes per character, are below the 2 GB limit of an Arrow array.
MAX_CHARACTERS = 250_000
# Cuts are in the second half only: a text that begins with headings would give many short chunks.
SEPARATORS = ("\n\n", "\n", " ")


def read_csv(opener: Opener, display_name: str, keys: TextKeys = DEFAULT_KEYS) -> Iterator[RawRow]:
    """Read the rows of a CSV file; cells may span lines, and rows without text are skipped.

    After a damaged record, lines may be the rest of it: those that close a quote, with all between, and those that directly
    follow and have another number of cells. They are part of the record, not rows.

    Args:
        keys: its delimiter and its columns, where the source names them. By default the delimiter is detected from the
            first rows, and the first row names the columns.
    Yields:
        Rows, or why one can't be read, with the line that each begins on.
    Raises:
        SnaketuneError: a header with a name twice, or a quote that is never closed.
    """
    csv.field_size_limit(MAX_CELL_LENGTH)
    delimiter = keys.delimiter
    if not delimiter:
        with opener() as file:
            delimiter = csv_delimiter(file.read(HEAD_LENGTH), display_name, len(keys.header) or None)
        delimiter = delimiter or ("\t" if suffix_of(display_name) == ".tsv" else ",")
    with _text(opener) as text:
        first = text.readline()
        skipped = int(bool(DELIMITER_LINE.fullmatch(first)))
        record: list[str] = []

        def lines() -> Iterator[str]:
            for line in text if skipped else chain([first], text):
                record.append(line)
                yield line

        reader = csv.reader(lines(), delimiter=delimiter, strict=True)
        try:
            header = list(keys.header) or next(filter(_has_text, reader), [])
        except csv.Error as error:
            what = f"the header, line {1 + skipped}, isn't valid CSV: {error}; fix its quotes, or fetch the file again"
            raise SnaketuneError(f"{display_name}: {what}") from None
        if len(set(header)) < len(header):
            duplicate = next(name for name in header if header.count(name) > 1)
            raise SnaketuneError(f"{display_name}: the header has the column {duplicate!r} twice; rename one of them")
        damage = ""
        # A damaged record, and the rows after it that may be part of it.
        held: list[RawRow] = []
        while True:
            line = reader.line_num + skipped + 1
            record.clear()
            try:
                cells = next(reader)
            except StopIteration:
                yield from held
                return
            except csv.Error as error:
                damage = str(error)
                if damage == "unexpected end of data":
                    raise SnaketuneError(
                        f"{display_name}: the row that begins on line {line} opens a quote that is never closed; "
                        "close it, or fetch the file again if it is cut off"
                    ) from None
                yield from held
                held = [RawRow("line", line, Malformed("not_csv", damage, "".join(record)[:EXCERPT_LENGTH]))]
                continue
            if not _has_text(cells):
                continue
            raw = RawRow("line", line, _csv_row(header, cells))
            if not held:
                yield raw
                continue
            closes_quote = "".join(record).count('"') % 2 == 1
            if closes_quote or (len(held) == 1 and len(cells) != len(header)):
                (begin, number, bad, _), end = held[0], reader.line_num + skipped
                what = f"{damage}; the record is taken to end on line {end}"
                held = [RawRow(begin, number, Malformed("not_csv", what, bad.excerpt))]
            else:
                held.append(raw)
            if closes_quote or len(held) > MAX_HELD:
                yield from held
                held = []


def _has_text(cells: list[str]) -> bool:
    return any(map(str.strip, cells))


def _csv_row(header: list[str], cells: list[str]) -> dict[str, str] | Malformed | Dropped:
    if cells[0].removeprefix("\ufeff") == header[0] and cells[1:] == header[1:]:
        # As in files that were appended to each other.
        return Dropped("repeated_header")
    if not all(map(str.isascii, cells)) and (malformed := _not_utf8(",".join(cells), "a cell")):
        return malformed
    if len(cells) != len(header):
        what = f"{len(cells)} cells, the header has {len(header)}"
        return Malformed("wrong_number_of_cells", what, ",".join(cells)[:EXCERPT_LENGTH])
    return dict(zip(header, cells))


def read_text(opener: Opener, display_name: str) -> Iterator[RawRow]:
    """Read a file that is one document, in chunks if it is long; each with the line that it begins on."""
    with _text(opener) as lines:
        text, line, chunks = "", 1, 0
        while True:
            text += lines.read(MAX_CHARACTERS + 1 - len(text)) if len(text) <= MAX_CHARACTERS else ""
            if not text:
                break
            end = chunk_end(text)
            chunk, text = text[:end], text[end:]
            chunks += 1
            yield RawRow("line", line, _not_utf8(chunk, "the text") or {TEXT: chunk})
            line += chunk.count("\n")
        if chunks > 1:
            print(f"{display_name} is a long document, read in {chunks} chunks", flush=True)


def chunk_end(text: str) -> int:
    """Return the length of the first chunk of a text.

    >>> chunk_end("word " * 60_000), chunk_end("word")
    (250000, 4)
    """
    if len(text) <= MAX_CHARACTERS:
        return len(text)
    for separator in SEPARATORS:
        position = text.rfind(separator, MAX_CHARACTERS // 2, MAX_CHARACTERS)
        if position >= 0:
            return position + len(separator)
    return MAX_CHARACTERS


def _text(opener: Opener) -> io.TextIOWrapper:
    return io.TextIOWrapper(opener(), encoding="utf-8-sig", errors="surrogateescape", newline="")


def _not_utf8(text: str, what: str) -> Malformed | None:
    """Return the reason if a text as read has bytes that aren't UTF-8."""
    if text.isascii() or not any("\udc80" <= character <= "\udcff" for character in text):
        return None
    bytes_ = text.encode(errors="surrogateescape")
    return Malformed("not_utf8", f"{what} isn't UTF-8; {advice(bytes_)}", text[:EXCERPT_LENGTH])
