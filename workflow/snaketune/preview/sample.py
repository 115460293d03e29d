"""The first rows of a source's files, and what is known of the files without reading them completely.

At most MAX_ROWS rows and MAX_CHARACTERS characters of a source are read, so that large files take no longer than small ones.
"""

from collections.abc import Iterable
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from snaketune.config.corpus_sources import Source
from snaketune.corpus.reading.formats import HEAD_LENGTH, CsvKeys, compression_of, format_of, open_decompressed
from snaketune.corpus.reading.sources import READ_ERRORS, hub_name, read_file, read_hub
from snaketune.corpus.rows import TEXT, RawRow, leaves
from snaketune.errors import SnaketuneError

MAX_ROWS = 2000
MAX_CHARACTERS = 2_500_000
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
        trouble: the error that ended reading.
    """

    name: str
    format: str = ""
    bytes: int | None = None
    raws: list[RawRow]
    whole: bool
    rows: int | None = None
    estimated: bool = False
    trouble: str | None = None


def samples_of(source: Source, kind: str | None) -> list[FileSample]:
    """Read the first rows of every file of a source, together at most MAX_ROWS.

    Args:
        kind: the kind of the corpus, if it is known.
    """
    if source.hub:
        raws, whole, trouble = _first_rows(read_hub(source.hub), MAX_ROWS, MAX_CHARACTERS)
        name, rows = hub_name(source.hub), len(raws) if whole else None
        return [FileSample(name=name, format="Hub dataset", raws=raws, whole=whole, rows=rows, trouble=trouble)]
    keys = CsvKeys(source.delimiter, source.header)
    max_rows, max_characters = (max(1, limit // len(source.files)) for limit in (MAX_ROWS, MAX_CHARACTERS))
    return [_of_file(Path(file), kind, keys, max_rows, max_characters) for file in source.files]


def _of_file(path: Path, kind: str | None, keys: CsvKeys, max_rows: int, max_characters: int) -> FileSample:
    name, head = str(path), b""
    # If it can't be read, the error of reading has why.
    with suppress(*READ_ERRORS), open_decompressed(path) as file:
        head = file.read(HEAD_LENGTH)
    format_ = _format(head, name, kind, keys)
    rows = read_file(path, name, plain=TEXT in (kind, format_), keys=keys)
    raws, whole, trouble = _first_rows(rows, max_rows, max_characters)
    if format_ is None:
        return FileSample(name=name, raws=[], whole=True, trouble=trouble)
    with path.open("rb") as file:
        compression = compression_of(file.read(HEAD_LENGTH))
    count, estimated = len(raws), False
    if not whole:
        count, estimated = (None, False) if compression else _rows_in_all(path, format_, raws)
    lines = format_ == "json" and any(raw.unit == "line" for raw in raws)
    format_name = FORMATS.get(format_) or ("JSON lines" if lines else "JSON")
    return FileSample(
        name=name,
        format=f"{format_name}, {compression}" if compression else format_name,
        bytes=path.stat().st_size,
        raws=raws,
        whole=whole,
        rows=count,
        estimated=estimated,
        trouble=trouble,
    )


def _format(head: bytes, name: str, kind: str | None, keys: CsvKeys) -> str | None:
    """The format; None if it isn't supported, for which the error of reading has the reason."""
    # A text in no other format is a document if the corpus may be of kind text.
    for plain in (kind == TEXT, kind in (None, TEXT) and b"\x00" not in head):
        with suppress(SnaketuneError):
            return format_of(head, name, plain=plain, keys=keys) if head else None
    return None


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


def _rows_in_all(path: Path, format_: str, raws: list[RawRow]) -> tuple[int | None, bool]:
    """The number of rows of a file that wasn't read completely, if known, and whether it is an estimate."""
    if format_ == "parquet":
        from pyarrow.parquet import read_metadata

        with suppress(*READ_ERRORS):
            return read_metadata(path).num_rows, False
    elif raws and raws[-1].unit == "line" and format_ != TEXT:
        with path.open("rb") as file:
            head = file.read(MAX_CHARACTERS)
        if lines := head.count(b"\n"):
            return max(raws[-1].number, round(path.stat().st_size / len(head) * lines)), True
    return None, False
