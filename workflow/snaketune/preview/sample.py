"""The first rows of a source's files, and what is known of the files without reading them whole.

At most MOST_ROWS rows and MOST_CHARACTERS characters of a source are read, so that a file of any size takes as long as a small
one. Of unpacked JSON lines, where a line is found wherever one looks, some rows further on are read too: a file put together of
several begins with the first.
"""

from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from snaketune.config.corpora import Source
from snaketune.corpus.excerpts import excerpt
from snaketune.corpus.raw import RawRow
from snaketune.corpus.reading.formats import GZIP_MAGIC, HEAD_LENGTH, ZSTD_MAGIC, format_of
from snaketune.corpus.reading.json_values import parse
from snaketune.corpus.reading.sources import NOT_THERE_OR_BROKEN, hub_name, open_unpacked, read_file, read_hub
from snaketune.corpus.rows import TEXT, Malformed
from snaketune.errors import SnaketuneError

MOST_ROWS = 2000
MOST_CHARACTERS = 2_500_000
FURTHER_ROWS, LONGEST_FURTHER = 50, 100_000
COMPRESSION = {GZIP_MAGIC: "gzip", ZSTD_MAGIC: "zstd"}
FORMATS = {"parquet": "Parquet", "arrow": "Arrow", "csv": "CSV", TEXT: "plain text"}


@dataclass(frozen=True, kw_only=True)
class Sample:
    """The first rows of one file, or of one Hub dataset.

    Attributes:
        format: how the rows are written down, compression included.
        bytes: size on disk; None for a Hub dataset.
        whole: whether these are all rows.
        rows: how many there are in all, as far as that is known without reading them.
        estimated: whether `rows` is an estimate, by the length of the first lines.
        further: some rows from the rest of the file, by the numbers that their lines are likely to have.
        trouble: why it can't be read, or not further.
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


def samples_of(source: Source, kind: str | None) -> list[Sample]:
    """The first rows of every file of a source, all together at most MOST_ROWS.

    Args:
        kind: what the corpus holds, where that is known.
    """
    if source.hub:
        raws, whole, trouble = _taken(read_hub(source.hub), MOST_ROWS, MOST_CHARACTERS)
        name = hub_name(source.hub)
        rows = len(raws) if whole else None
        return [Sample(name=name, format="Hub dataset", raws=raws, whole=whole, rows=rows, trouble=trouble)]
    files = len(source.files)
    return [
        _of_file(Path(file), kind, max(1, MOST_ROWS // files), max(1, MOST_CHARACTERS // files))
        for file in source.files
    ]


def _of_file(path: Path, kind: str | None, most_rows: int, most_characters: int) -> Sample:
    name = str(path)
    try:
        form = _format(path, kind)
    except SnaketuneError as error:
        return Sample(name=name, raws=[], whole=True, trouble=str(error))
    raws, whole, trouble = _taken(read_file(path, name, plain=form == TEXT), most_rows, most_characters)
    if form is None:
        return Sample(name=name, raws=[], whole=True, trouble=trouble)
    compression = _compression(path)
    rows, estimated = (len(raws), False) if whole else _rows_in_all(path, form, compression, raws)
    lines = form == "json" and any(raw.unit == "line" for raw in raws)
    shown = FORMATS.get(form) or ("JSON lines" if lines else "JSON")
    return Sample(
        name=name,
        format=f"{shown}, {compression}" if compression else shown,
        bytes=path.stat().st_size,
        raws=raws,
        whole=whole,
        rows=rows,
        estimated=estimated,
        further=_further(path, rows, raws[-1].number) if lines and rows and not whole and not compression else [],
        trouble=trouble,
    )


def _format(path: Path, kind: str | None) -> str | None:
    """The format; None where the file can't be opened, of which reading it says more.

    Raises:
        SnaketuneError: none that is read here.
    """
    if not path.is_file():
        return None
    try:
        with open_unpacked(path) as file:
            head = file.read(HEAD_LENGTH)
    except NOT_THERE_OR_BROKEN:
        return None
    try:
        return format_of(head, str(path), plain=kind == TEXT) if head else None
    except SnaketuneError:
        # A text in no other format is a document, of a corpus of kind text.
        form = format_of(head, str(path), plain=True)
        if kind is None and b"\x00" not in head:
            return form
        raise


def _compression(path: Path) -> str | None:
    with path.open("rb") as file:
        head = file.read(len(ZSTD_MAGIC))
    return next((name for magic, name in COMPRESSION.items() if head.startswith(magic)), None)


def _taken(rows: Iterable[RawRow], most_rows: int, most_characters: int) -> tuple[list[RawRow], bool, str | None]:
    """The first rows; whether these are all; and what ended them, where that is an error."""
    taken: list[RawRow] = []
    characters = 0
    reading = iter(rows)
    try:
        with closing(reading):  # type: ignore[type-var]
            for raw in reading:
                if len(taken) == most_rows or characters > most_characters:
                    return taken, False, None
                taken.append(raw)
                characters += _length(raw.found)
    except SnaketuneError as error:
        return taken, False, str(error)
    return taken, True, None


def _length(value: Any) -> int:
    """Characters of all texts in a value."""
    return sum(len(text) for text in _texts(value))


def _texts(value: Any) -> Iterator[str]:
    waiting = [value]
    while waiting:
        match waiting.pop():
            case str() as text:
                yield text
            case dict() as some:
                waiting += some.values()
            case list() as some:
                waiting += some


def _rows_in_all(path: Path, form: str, compression: str | None, raws: list[RawRow]) -> tuple[int | None, bool]:
    """How many rows a file has that wasn't read whole, and whether that is an estimate."""
    if compression is None and form == "parquet":
        from pyarrow.parquet import read_metadata

        return read_metadata(path).num_rows, False
    if compression is None and raws and raws[-1].unit == "line" and form != TEXT:
        with path.open("rb") as file:
            head = file.read(MOST_CHARACTERS)
        lines = head.count(b"\n")
        return (max(raws[-1].number, round(path.stat().st_size / len(head) * lines)), True) if lines else (None, False)
    return None, False


def _further(path: Path, rows: int, read: int) -> list[RawRow]:
    """Lines at even distances, of those that weren't read, and the last one.

    Args:
        rows: how many lines the file is thought to have.
        read: how many of them were read.
    """
    size = path.stat().st_size
    numbers = sorted({read + (rows - read) * part // FURTHER_ROWS for part in range(1, FURTHER_ROWS)})
    lines = {}
    with path.open("rb") as file:
        for number in numbers:
            file.seek(size * number // rows)
            # Where the line begins that is met first isn't known.
            if file.readline(LONGEST_FURTHER).endswith(b"\n"):
                lines[number] = file.readline(LONGEST_FURTHER)
        file.seek(max(0, size - LONGEST_FURTHER))
        *before, last = file.read(LONGEST_FURTHER).rstrip().split(b"\n")
    found = [RawRow("line", number, _row(line)) for number, line in lines.items() if line.endswith(b"\n")]
    return [*found, RawRow("line", rows, _row(last))] if before else found


def _row(line: bytes) -> dict[str, Any] | Malformed:
    try:
        value = parse(line)
    except Malformed as error:
        return error
    return value if isinstance(value, dict) else Malformed("not_an_object", f"found {excerpt(value)}")
