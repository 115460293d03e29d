"""CSV files with any delimiter to raw rows. Errors in a row affect only that row; a quote never closed fails the file."""

import csv
import io
from collections.abc import Iterator

from snaketune.corpus.excerpts import EXCERPT_LENGTH
from snaketune.corpus.raw_rows import RawRow
from snaketune.corpus.reading.encodings import advice
from snaketune.corpus.reading.formats import DEFAULT_KEYS, HEAD_LENGTH, Opener, TextKeys, csv_delimiter, suffix_of
from snaketune.corpus.rows import Malformed
from snaketune.errors import SnaketuneError

MAX_CELL_LENGTH = 2**31 - 1


def read_csv(opener: Opener, display_name: str, keys: TextKeys = DEFAULT_KEYS) -> Iterator[RawRow]:
    """Read the rows of a CSV file; cells may span lines.

    Args:
        opener: opens the file at its beginning.
        display_name: its name in messages.
        keys: its delimiter and its columns, where the source names them. By default the delimiter is detected from the
            first rows, and the first row names the columns.
    Yields:
        Rows, or why one can't be read, with the line that each begins on.
    Raises:
        SnaketuneError: a header with a name twice, or a quote that is never closed.
    """
    csv.field_size_limit(MAX_CELL_LENGTH)
    delimiter = keys.delimiter or _delimiter(opener, display_name, len(keys.header) or None)
    # Bytes that aren't UTF-8 become lone surrogates, so that they make one row malformed instead of failing the file.
    with io.TextIOWrapper(opener(), encoding="utf-8-sig", errors="surrogateescape", newline="") as text:
        last = [""]

        def lines() -> Iterator[str]:
            for last[0] in text:
                yield last[0]

        reader = csv.reader(lines(), delimiter=delimiter, strict=True)
        try:
            header = list(keys.header) or next((cells for cells in reader if cells), [])
        except csv.Error as error:
            raise SnaketuneError(
                f"{display_name}: the header, line 1, isn't valid CSV: {error}; fix its quotes, or fetch the file again"
            ) from None
        if len(set(header)) < len(header):
            duplicate = next(name for name in header if header.count(name) > 1)
            raise SnaketuneError(f"{display_name}: the header has the column {duplicate!r} twice; rename one of them")
        while True:
            line = reader.line_num + 1
            try:
                cells = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                if str(error) == "unexpected end of data":
                    raise SnaketuneError(
                        f"{display_name}: the row that begins on line {line} opens a quote that is never closed; "
                        "close it, or fetch the file again if it is cut off"
                    ) from None
                yield RawRow("line", line, Malformed("not_csv", str(error), last[0][:EXCERPT_LENGTH]))
                continue
            if cells:
                yield RawRow("line", line, _csv_row(header, cells))


def _delimiter(opener: Opener, display_name: str, columns: int | None) -> str:
    with opener() as file:
        head = file.read(HEAD_LENGTH)
    return csv_delimiter(head, display_name, columns) or ("\t" if suffix_of(display_name) == ".tsv" else ",")


def _csv_row(header: list[str], cells: list[str]) -> dict[str, str] | Malformed:
    text_excerpt = ",".join(cells)[:EXCERPT_LENGTH]
    if any("\udc80" <= character <= "\udcff" for cell in cells if not cell.isascii() for character in cell):
        return Malformed(
            "not_utf8", f"a cell isn't UTF-8; {advice(','.join(cells).encode(errors='surrogateescape'))}", text_excerpt
        )
    if len(cells) != len(header):
        return Malformed("wrong_number_of_cells", f"{len(cells)} cells, the header has {len(header)}", text_excerpt)
    return dict(zip(header, cells))
