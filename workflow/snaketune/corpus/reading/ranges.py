"""One of several ranges of a file, for a job that reads a part of it: bytes of JSON lines, row groups of Parquet.

A line belongs to the range that holds its first byte, so that ranges together have each line once. The columns of the first
rows of the file decide its layout, so these are read for each range. Whatever can't be cut is read whole by the first range:
compressed files, arrays, CSV, texts in other encodings, layouts that join rows, and files of web servers that send them whole.
"""

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import islice
from typing import BinaryIO, NamedTuple

from snaketune.corpus.reading.archives import is_zip, open_decompressed
from snaketune.corpus.reading.encodings import UTF_8
from snaketune.corpus.reading.formats import HEAD_LENGTH, TextKeys, format_of
from snaketune.corpus.reading.json_files import is_json_lines, json_lines
from snaketune.corpus.reading.sources import explained_errors, read_files
from snaketune.corpus.reading.tables import parquet_groups, read_parquet_groups
from snaketune.corpus.rows import RawRow
from snaketune.locations import File, size_of
from snaketune.remote_files import open_file


class Range(NamedTuple):
    """Pieces `first` to `last` (from 1) of `count` equal ones; all of a file by default."""

    first: int = 1
    last: int = 1
    count: int = 1

    def of(self, size: int) -> tuple[int, int]:
        """Begin and end of this range of so many items.

        >>> [Range(first, last, 4).of(10) for first, last in ((1, 1), (2, 3), (4, 4))]
        [(0, 2), (2, 7), (7, 10)]
        """
        return size * (self.first - 1) // self.count, size * self.last // self.count


class LineSpan:
    """The lines of a file that begin in a span of bytes. Attributes: count: the lines read so far."""

    def __init__(self, start: int, end: int):
        self.start, self.end, self.count = start, end, 0

    def lines(self, file: BinaryIO) -> Iterator[bytes]:
        position = self.start
        if self.start:
            # From the byte before, which may end a line.
            file.seek(self.start - 1)
            position += len(file.readline()) - 1
        if position >= self.end:
            return
        for line in file:
            self.count += 1
            yield line
            position += len(line)
            if position >= self.end:
                return


class RangeRows(NamedTuple):
    """Attributes:
    head: the first rows of the file, which decide its layout.
    rows: the rows of the range.
    label: the range's name in messages.
    span: the lines that it covers, from which the numbers of its rows count; None where they count from the file's start.
    """

    head: list[RawRow]
    rows: Iterable[RawRow]
    label: str
    span: LineSpan | None = None


def read_range(
    path: File, display_name: str, part: Range, *, rows_compared: int, plain: bool, keys: TextKeys
) -> RangeRows | None:
    """The rows of a range of a file; None if the file can't be cut. Raises what `read_files` raises."""
    with explained_errors(display_name):
        if is_zip(path):
            return None
        opener = partial(open_decompressed, path)
        with open_file(path) as file, opener() as decompressed:
            head = file.read(HEAD_LENGTH)
            is_cut = file.seekable() and decompressed.read(HEAD_LENGTH) == head
        if not is_cut or not head or keys.encoding != UTF_8:
            return None
        format_ = format_of(head, display_name, plain=plain, keys=keys)
        if format_ == "json" and is_json_lines(opener, display_name):
            start, end = part.of(size_of(path))
            span = LineSpan(start, end)
            label = f"{display_name}, from byte {start:,}" if start else display_name
            rows: Iterable[RawRow] = json_lines(opener, span)
        elif format_ == "parquet":
            begin, end = part.of(parquet_groups(opener, display_name))
            span, label = None, display_name
            rows = read_parquet_groups(opener, display_name, range(begin, end))
        else:
            return None
    ((_, whole),) = read_files(path, display_name, plain=plain, keys=keys)
    return RangeRows(list(islice(whole, rows_compared)), _explained(rows, display_name), label, span)


def _explained(rows: Iterable[RawRow], display_name: str) -> Iterator[RawRow]:
    with explained_errors(display_name):
        yield from rows
