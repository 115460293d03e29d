"""The files in zip and tar archives, in order of name, each opened where it lies: nothing is written to disk.

A member of a zip, or of a tar that isn't packed, is read at its place. A packed tar can only be read from its beginning on, so
its members are unpacked into memory, as many at once as HELD has room for; only one that is larger by itself is unpacked anew
each time that it is opened. Where they lie in order of name, as with `tar --sort=name`, one pass through the archive does.
"""

import io
import tarfile
import zipfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import BinaryIO, NamedTuple

from snaketune.corpus.excerpts import printable
from snaketune.corpus.reading.formats import Opener
from snaketune.corpus.reading.unreadable_formats import refuse_zipped
from snaketune.errors import SnaketuneError

BadZipFile = zipfile.BadZipFile
ZIP_MAGIC = (b"PK\x03\x04", b"PK\x05\x06")
ZIP_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA)
ENCRYPTED = 1
# The record at the end with the longest comment; and the number of members there that stands for that and more.
MAX_END_RECORD, COUNT_OVERFLOW = 22 + 65535, 65535
BUFFER_BYTES = 64 << 20
BYTES_PER_READ = 1 << 20


class Member(NamedTuple):
    """A file in an archive; `opening` is None for links and what else has no content of its own."""

    name: str
    opener: Opener | None


class _TarEntry(NamedTuple):
    name: str
    offset: int
    size: int


class _Header(tarfile.TarInfo):
    """A header of a tar. tarfile takes a damaged one for the end of the archive, and leaves out what follows."""

    @classmethod
    def frombuf(cls, buf: bytes, encoding: str, errors: str) -> tarfile.TarInfo:
        try:
            return super().frombuf(buf, encoding, errors)
        except tarfile.EOFHeaderError:
            raise
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(str(error)) from None


class _Slice(io.RawIOBase):
    """The next `size` bytes of a file."""

    def __init__(self, file: BinaryIO, size: int):
        self.file, self.remaining = file, size

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:
        data = self.file.read(min(len(buffer), self.remaining))
        if self.remaining and buffer and not data:
            raise EOFError("the archive ends within a file")
        self.remaining -= len(data)
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self.file.close()
        super().close()


def is_zip(path: Path) -> bool:
    """Whether a file begins as a zip archive."""
    with path.open("rb") as file:
        return file.read(4) in ZIP_MAGIC


def is_tar(head: bytes) -> bool:
    """Whether a file begins with the header of a tar, whose checksum is right."""
    try:
        tarfile.TarInfo.frombuf(head[: tarfile.BLOCKSIZE], "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        return False
    return True


def zip_members(path: Path, display_name: str) -> Iterator[Member]:
    """The files in a zip archive.

    Raises:
        SnaketuneError: one is encrypted, or packed in a way that isn't read here; or it is a document such as a workbook.
    """
    try:
        archive = zipfile.ZipFile(path)
    except BadZipFile as error:
        raise SnaketuneError(
            f"{display_name} is a zip archive that is damaged or cut off: {error}; fetch it again"
        ) from None
    except NotImplementedError as error:
        raise SnaketuneError(
            f"{display_name} is a zip archive that isn't unpacked here: {error}; unpack it, and name its files"
        ) from None
    with archive:
        if len(archive.infolist()) not in _recorded_counts(path):
            raise SnaketuneError(f"{display_name} is a zip archive with a damaged directory; fetch it again")
        refuse_zipped(archive.namelist(), display_name)
        for info in sorted(archive.infolist(), key=lambda info: info.filename):
            if info.is_dir() and not info.file_size:
                continue
            name = f"{display_name}/{printable(info.filename)}"
            if info.flag_bits & ENCRYPTED:
                raise SnaketuneError(f"{name} is encrypted; unpack it, and name the files")
            if info.compress_type not in ZIP_METHODS:
                method = zipfile.compressor_names.get(info.compress_type, info.compress_type)
                raise SnaketuneError(
                    f"{name} is packed with {method}, which isn't unpacked here; unpack it, and name the files"
                )
            yield Member(info.filename, partial(_open_zipped, archive, info, name))


def _recorded_counts(path: Path) -> tuple[int, ...] | range:
    """How many members a zip archive says that it has, which zipfile doesn't look at; any number from MANY on."""
    with path.open("rb") as file:
        file.seek(-min(path.stat().st_size, MAX_END_RECORD), io.SEEK_END)
        end = file.read()
    number = int.from_bytes(end[end.rfind(ZIP_MAGIC[1]) :][10:12], "little")
    return range(COUNT_OVERFLOW, 1 << 62) if number == COUNT_OVERFLOW else (number,)


def _open_zipped(archive: zipfile.ZipFile, info: zipfile.ZipInfo, name: str) -> BinaryIO:
    try:
        return io.BufferedReader(archive.open(info), BYTES_PER_READ)
    except NotImplementedError as error:
        raise SnaketuneError(f"{name} isn't unpacked here: {error}; unpack it, and name the files") from None


def tar_members(opener: Opener, display_name: str) -> Iterator[Member]:
    """The files in a tar.

    Args:
        opening: opens it, unpacked.
        shown: its name.
    Raises:
        SnaketuneError: it is damaged or cut off.
    """
    with opener() as file:
        entries, others = _tar_entries(file, display_name)
        on_disk = _is_on_disk(file)
    yield from (Member(name, None) for name in others)
    ordered = sorted(entries.values())
    if on_disk:
        yield from (Member(entry.name, partial(_open_at, opener, entry)) for entry in ordered)
        return
    file, position = opener(), 0
    try:
        for batch in _batches(ordered):
            if batch[0].size > BUFFER_BYTES:
                yield Member(batch[0].name, partial(_open_at, opener, batch[0]))
                continue
            contents: dict[str, bytes] = {}
            for name, offset, size in sorted(batch, key=lambda entry: entry.offset):
                if offset < position:
                    file.close()
                    file, position = opener(), 0
                _skip(file, offset - position)
                contents[name] = _read(file, size)
                position = offset + size
            yield from (Member(entry.name, partial(io.BytesIO, contents.pop(entry.name))) for entry in batch)
    finally:
        file.close()


def _batches(entries: list[_TarEntry]) -> Iterator[list[_TarEntry]]:
    """Places in their order, as many at once as HELD has room for, and at least one."""
    batch: list[_TarEntry] = []
    for entry in entries:
        if batch and sum(contents.size for contents in batch) + entry.size > BUFFER_BYTES:
            yield batch
            batch = []
        batch.append(entry)
    if batch:
        yield batch


def _tar_entries(file: BinaryIO, display_name: str) -> tuple[dict[str, _TarEntry], list[str]]:
    """Where the content of each file lies, and the names of links and the like. Of two with one name, the last counts."""
    entries: dict[str, _TarEntry] = {}
    others: list[str] = []
    last = ""
    try:
        with tarfile.open(fileobj=file, mode="r:" if file.seekable() else "r|", tarinfo=_Header) as archive:
            for info in archive:
                last = f" after {printable(info.name)}"
                if info.isreg() and not info.issparse():
                    entries[info.name] = _TarEntry(info.name, info.offset_data, info.size)
                elif not info.isdir():
                    others.append(info.name)
    except tarfile.TarError as error:
        raise SnaketuneError(
            f"{display_name} is a tar archive that{last} is damaged or cut off: {error}; fetch it again"
        ) from None
    return entries, [name for name in others if name not in entries]


def _is_on_disk(file: BinaryIO) -> bool:
    return isinstance(getattr(file, "raw", None), io.FileIO)


def _open_at(opener: Opener, entry: _TarEntry) -> BinaryIO:
    file = opener()
    if _is_on_disk(file):
        file.seek(entry.offset)
    else:
        _skip(file, entry.offset)
    return io.BufferedReader(_Slice(file, entry.size), BYTES_PER_READ)


def _skip(file: BinaryIO, size: int) -> None:
    while size:
        size -= len(_read(file, min(size, BYTES_PER_READ)))


def _read(file: BinaryIO, size: int) -> bytes:
    data = file.read(size)
    if len(data) < size:
        raise EOFError("the archive ends within a file")
    return data
