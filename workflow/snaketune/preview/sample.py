"""The first rows of a source's files, and what is known of the files without reading them completely.

At most MAX_ROWS rows and MAX_CHARACTERS characters of a source are read, so that large files take no longer than small ones. Of
uncompressed JSON lines, where a line can be found at any offset, some later rows are read, too: a file that concatenates
several begins with rows of the first.
"""

from collections.abc import Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path

from snaketune.config.corpus_sources import Source
from snaketune.corpus.reading.archives import GZIP_MAGIC, XZ_MAGIC, ZSTD_MAGIC, is_tar, is_zip, open_decompressed
from snaketune.corpus.reading.encodings import UTF_8, may_be_western, other_unicode
from snaketune.corpus.reading.formats import HEAD_LENGTH, TextKeys, format_of, suffix_of, table_format
from snaketune.corpus.reading.json_files import rows_of_line
from snaketune.corpus.reading.sources import READ_ERRORS, hub_name, read_files, read_hub
from snaketune.corpus.rows import TEXT, RawRow, leaves
from snaketune.errors import SnaketuneError
from snaketune.locations import File, located, size_of
from snaketune.remote_files import HEAD_BYTES, open_file

MAX_ROWS = 2000
MAX_CHARACTERS = 2_500_000
# Limit per file in an archive, so that several files are read.
MAX_ROWS_PER_MEMBER = 500
FURTHER_ROWS, MAX_LINE = 50, 100_000
COMPRESSION = {GZIP_MAGIC: "gzip", XZ_MAGIC: "xz", ZSTD_MAGIC: "zstd"}
FORMATS = {"parquet": "Parquet", "arrow": "Arrow", "csv": "CSV", TEXT: "plain text"}


@dataclass(frozen=True, kw_only=True)
class FileSample:
    """The first rows of one file, or of one Hub dataset.

    Attributes:
        format: format of the file, and its compression.
        bytes: size on disk; None for a Hub dataset.
        whole: whether these are all rows.
        rows: number of all rows; None if it isn't known without reading them.
        estimated: whether `rows` is estimated from the length of the first lines.
        further: some rows from the rest of the file, with estimated line numbers.
        trouble: the error that ended reading.
    """

    name: str
    format: str = ""
    bytes: int | None = None
    raws: list[RawRow]
    whole: bool
    rows: int | None = None
    estimated: bool = False
    further: list[RawRow] = field(default_factory=list)
    trouble: str | None = None


def samples_of(source: Source, kind: str | None) -> list[FileSample]:
    """Read the first rows of every file of a source, together at most MAX_ROWS; of an archive, of the files in it.

    Args:
        kind: the kind of the corpus, if it is known.
    """
    if source.hub:
        raws, whole, trouble = _first_rows(read_hub(source.hub), MAX_ROWS, MAX_CHARACTERS)
        name, rows = hub_name(source.hub), len(raws) if whole else None
        return [FileSample(name=name, format="Hub dataset", raws=raws, whole=whole, rows=rows, trouble=trouble)]
    keys = TextKeys(source.encoding, source.delimiter, source.header)
    max_rows, max_characters = (max(1, limit // len(source.files)) for limit in (MAX_ROWS, MAX_CHARACTERS))
    return [sample for file in source.files for sample in _of_file(located(file), kind, keys, max_rows, max_characters)]


def encoding_of(path: File) -> str:
    """The encoding of a text file, as far as its first bytes show it."""
    head = _head(path)
    # The zero bytes of a small Arrow file look like those of UTF-16.
    if table_format(head):
        return UTF_8
    if encoding := other_unicode(head):
        return encoding
    try:
        # The last line may be cut within a character.
        head[: head.rfind(b"\n") + 1].decode()
        return UTF_8
    except UnicodeDecodeError:
        return "cp1252" if may_be_western(head) else UTF_8


def _of_file(path: File, kind: str | None, keys: TextKeys, max_rows: int, max_characters: int) -> Iterator[FileSample]:
    """Yield one sample, or of an archive one for each file in it, until there are enough rows."""
    name, head = str(path), _head(path)
    archive = "tar" if is_tar(head) else "zip" if head and is_zip(path) else None
    format_ = None if archive else _format(head, name, kind, keys)
    members = read_files(path, name, plain=TEXT in (kind, format_), keys=keys)
    try:
        with closing(members):  # type: ignore[type-var]
            for member, rows in members:
                if not archive:
                    yield _sample(path, format_, keys, *_first_rows(rows, max_rows, max_characters))
                    continue
                raws, whole, trouble = _first_rows(rows, min(max_rows, MAX_ROWS_PER_MEMBER), max_characters)
                format_name = f"{suffix_of(member)[1:] or 'file'} in a {archive}"
                count = len(raws) if whole else None
                yield FileSample(name=member, format=format_name, raws=raws, whole=whole, rows=count, trouble=trouble)
                max_rows -= len(raws)
                max_characters -= sum(map(_length, raws))
                if max_rows <= 0 or max_characters <= 0:
                    return
    except SnaketuneError as error:
        yield FileSample(name=name, raws=[], whole=True, trouble=str(error))


def _sample(
    path: File, format_: str | None, keys: TextKeys, raws: list[RawRow], whole: bool, trouble: str | None
) -> FileSample:
    """The sample of a file that isn't an archive; `format_` is its format, None if it isn't supported."""
    if format_ is None:
        return FileSample(name=str(path), raws=[], whole=True, trouble=trouble)
    with open_file(path) as file:
        magic = file.read(max(map(len, COMPRESSION)))
    compression = next((name for start, name in COMPRESSION.items() if magic.startswith(start)), None)
    rows, estimated = len(raws), False
    if not whole:
        rows, estimated = (None, False) if compression else _rows_in_all(path, format_, raws)
    lines = format_ == "json" and any(raw.unit == "line" for raw in raws)
    format_name = FORMATS.get(format_) or ("JSON lines" if lines else "JSON")
    cheap = lines and rows and not (whole or compression) and keys.encoding == UTF_8
    return FileSample(
        name=str(path),
        format=f"{format_name}, {compression}" if compression else format_name,
        bytes=size_of(path),
        raws=raws,
        whole=whole,
        rows=rows,
        estimated=estimated,
        further=_further(path, rows, raws[-1].number) if cheap and isinstance(path, Path) else [],
        trouble=trouble,
    )


def _format(head: bytes, name: str, kind: str | None, keys: TextKeys) -> str | None:
    """The format; None if it isn't supported, for which the error of reading has the reason."""
    if keys.encoding != UTF_8:
        head = head.decode(keys.encoding, "ignore").encode()
    # A text in no other format is a document if the corpus may be of kind text.
    for plain in (kind == TEXT, kind in (None, TEXT) and b"\x00" not in head):
        with suppress(SnaketuneError):
            return format_of(head, name, plain=plain, keys=keys) if head else None
    return None


def _head(path: File) -> bytes:
    """The first bytes of a file, decompressed; nothing if it can't be read, for which the error of reading has why."""
    with suppress(SnaketuneError, *READ_ERRORS), open_decompressed(path) as file:
        return file.read(HEAD_LENGTH)
    return b""


def _first_rows(rows: Iterable[RawRow], max_rows: int, max_characters: int) -> tuple[list[RawRow], bool, str | None]:
    """The first rows; whether these are all; and the error that ended them, if any."""
    first_rows: list[RawRow] = []
    characters = 0
    reading = iter(rows)
    try:
        with closing(reading):  # type: ignore[type-var]
            for raw in reading:
                if len(first_rows) == max_rows or characters > max_characters:
                    return first_rows, False, None
                first_rows.append(raw)
                characters += _length(raw)
    except SnaketuneError as error:
        return first_rows, False, str(error)
    return first_rows, True, None


def _length(raw: RawRow) -> int:
    return sum(len(leaf) for leaf in leaves(raw.value) if isinstance(leaf, str))


def _rows_in_all(path: File, format_: str, raws: list[RawRow]) -> tuple[int | None, bool]:
    """The number of rows of a file that wasn't read completely, if known, and whether it is an estimate."""
    if format_ == "parquet":
        from pyarrow.parquet import read_metadata

        with suppress(*READ_ERRORS):
            return read_metadata(open_file(path)).num_rows, False
    elif raws and raws[-1].unit == "line" and format_ != TEXT:
        with open_file(path) as file:
            # Of a remote file, what is in memory.
            head = file.read(MAX_CHARACTERS if isinstance(path, Path) else HEAD_BYTES)
        if lines := head.count(b"\n"):
            return max(raws[-1].number, round(size_of(path) / len(head) * lines)), True
    return None, False


def _further(path: File, rows: int, read: int) -> list[RawRow]:
    """Rows at even distances of those that weren't read, and the last one.

    Args:
        rows: estimated number of lines in the file.
        read: number of lines read.
    """
    size = size_of(path)
    numbers = sorted({read + (rows - read) * part // FURTHER_ROWS for part in range(1, FURTHER_ROWS)})
    lines = {}
    with open_file(path) as file:
        for number in numbers:
            file.seek(size * number // rows)
            # The first line is cut, so the second is taken.
            if file.readline(MAX_LINE).endswith(b"\n"):
                lines[number] = file.readline(MAX_LINE)
        file.seek(max(0, size - MAX_LINE))
        *before, last = file.read(MAX_LINE).rstrip().split(b"\n")
    lines = {number: line for number, line in lines.items() if line.endswith(b"\n")}
    if before:
        lines[rows] = last
    return [row for number, line in lines.items() for row in rows_of_line(number, line)]
