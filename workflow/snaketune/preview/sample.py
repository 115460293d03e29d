"""The first rows of a source's files, and what is known of the files without reading them whole.

At most MOST_ROWS rows and MOST_CHARACTERS characters of a source are read, so that a file of any size takes as long as a small
one. Of unpacked JSON lines, where a line is found wherever one looks, some rows further on are read too: a file put together of
several begins with the first.
"""

from collections.abc import Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from snaketune.config.corpus_sources import Source
from snaketune.corpus.excerpts import excerpt
from snaketune.corpus.raw_rows import Noted, RawRow
from snaketune.corpus.reading.archives import is_tar, is_zip
from snaketune.corpus.reading.decompression import GZIP_MAGIC, XZ_MAGIC, ZSTD_MAGIC, open_decompressed
from snaketune.corpus.reading.encodings import UTF_8, may_be_western, other_unicode
from snaketune.corpus.reading.formats import HEAD_LENGTH, TextKeys, format_of, suffix_of
from snaketune.corpus.reading.json_values import parse
from snaketune.corpus.reading.sources import READ_ERRORS, hub_name, read_files, read_hub
from snaketune.corpus.rows import TEXT, Malformed
from snaketune.errors import SnaketuneError

MAX_ROWS = 2000
MAX_CHARACTERS = 2_500_000
# Of one file in an archive, so that others are seen too.
MAX_ROWS_PER_MEMBER = 500
FURTHER_ROWS, MAX_LINE = 50, 100_000
COMPRESSION = {GZIP_MAGIC: "gzip", XZ_MAGIC: "xz", ZSTD_MAGIC: "zstd"}
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
    """The first rows of every file of a source, all together at most MOST_ROWS; of an archive, of the files in it.

    Args:
        kind: what the corpus holds, where that is known.
    """
    if source.hub:
        raws, whole, trouble = _taken(read_hub(source.hub), MAX_ROWS, MAX_CHARACTERS)
        name = hub_name(source.hub)
        rows = len(raws) if whole else None
        return [Sample(name=name, format="Hub dataset", raws=raws, whole=whole, rows=rows, trouble=trouble)]
    keys = TextKeys(source.encoding, source.delimiter, source.header)
    limits = (max(1, whole // len(source.files)) for whole in (MAX_ROWS, MAX_CHARACTERS))
    most_rows, most_characters = limits
    return [sample for file in source.files for sample in _of_file(Path(file), kind, keys, most_rows, most_characters)]


def encoding_of(path: Path) -> str:
    """The encoding that a text file is in, as far as its first bytes give it away."""
    try:
        head = _head(path)
    except READ_ERRORS:
        return UTF_8
    if encoding := other_unicode(head):
        return encoding
    try:
        # The last line may be cut within a character.
        head[: head.rfind(b"\n") + 1].decode()
        return UTF_8
    except UnicodeDecodeError:
        return "cp1252" if may_be_western(head) else UTF_8


def _of_file(path: Path, kind: str | None, keys: TextKeys, most_rows: int, most_characters: int) -> Iterator[Sample]:
    """One sample, or of an archive one for each file in it, until there are enough rows."""
    name, archive = str(path), _archive(path)
    form = None if archive else _format(path, kind, keys)
    members = read_files(path, name, plain=TEXT in (kind, form), keys=keys)
    try:
        with closing(members):  # type: ignore[type-var]
            for member, rows in members:
                if not archive:
                    yield _sample(path, form, keys, *_taken(rows, most_rows, most_characters))
                    continue
                raws, whole, trouble = _taken(rows, min(most_rows, MAX_ROWS_PER_MEMBER), most_characters)
                shown = f"{suffix_of(member)[1:] or 'file'} in a {archive}"
                count = len(raws) if whole else None
                yield Sample(name=member, format=shown, raws=raws, whole=whole, rows=count, trouble=trouble)
                most_rows -= len(raws)
                most_characters -= sum(_length(raw.value) for raw in raws)
                if most_rows <= 0 or most_characters <= 0:
                    return
    except SnaketuneError as error:
        yield Sample(name=name, raws=[], whole=True, trouble=str(error))


def _sample(
    path: Path, form: str | None, keys: TextKeys, raws: list[RawRow], whole: bool, trouble: str | None
) -> Sample:
    """Of a file that is no archive; Args: form: its format, None where there is none that is read here."""
    if form is None:
        return Sample(name=str(path), raws=[], whole=True, trouble=trouble)
    compression = _compression(path)
    rows, estimated = (len(raws), False) if whole else _rows_in_all(path, form, compression, raws)
    lines = form == "json" and any(raw.unit == "line" for raw in raws)
    shown = FORMATS.get(form) or ("JSON lines" if lines else "JSON")
    cheap = lines and rows and not (whole or compression) and keys.encoding == UTF_8
    return Sample(
        name=str(path),
        format=f"{shown}, {compression}" if compression else shown,
        bytes=path.stat().st_size,
        raws=raws,
        whole=whole,
        rows=rows,
        estimated=estimated,
        further=_further(path, rows, raws[-1].number) if cheap else [],
        trouble=trouble,
    )


def _archive(path: Path) -> str | None:
    """What kind of archive a file is, if it is one."""
    try:
        return "zip" if is_zip(path) else "tar" if is_tar(_head(path)) else None
    except READ_ERRORS:
        return None


def _format(path: Path, kind: str | None, keys: TextKeys) -> str | None:
    """The format; None where there is none that is read here, of which reading it says more."""
    try:
        head = _head(path)
        if keys.encoding != UTF_8:
            head = head.decode(keys.encoding, "ignore").encode()
    except READ_ERRORS:
        return None
    # A text in no other format is a document, of a corpus of kind text.
    for plain in (kind == TEXT, kind in (None, TEXT) and b"\x00" not in head):
        try:
            return format_of(head, str(path), plain=plain, keys=keys) if head else None
        except SnaketuneError:
            continue
    return None


def _head(path: Path) -> bytes:
    with open_decompressed(path) as file:
        return file.read(HEAD_LENGTH)


def _compression(path: Path) -> str | None:
    with path.open("rb") as file:
        head = file.read(len(XZ_MAGIC))
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
                characters += _length(raw.value)
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

        with suppress(*READ_ERRORS):
            return read_metadata(path).num_rows, False
        return None, False
    if compression is None and raws and raws[-1].unit == "line" and form != TEXT:
        with path.open("rb") as file:
            head = file.read(MAX_CHARACTERS)
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
            if file.readline(MAX_LINE).endswith(b"\n"):
                lines[number] = file.readline(MAX_LINE)
        file.seek(max(0, size - MAX_LINE))
        *before, last = file.read(MAX_LINE).rstrip().split(b"\n")
    found = [_row(number, line) for number, line in lines.items() if line.endswith(b"\n")]
    return [*found, _row(rows, last)] if before else found


def _row(number: int, line: bytes) -> RawRow:
    try:
        value = parse(line)
    except Malformed as error:
        value = error
    found, notes = (value.value, value.notes) if isinstance(value, Noted) else (value, ())
    if not isinstance(found, dict | Malformed):
        found = Malformed("not_an_object", f"found {excerpt(found)}")
    return RawRow("line", number, found, notes)
