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
from snaketune.corpus.reading.formats import Opening
from snaketune.corpus.reading.unreadable_formats import refuse_zipped
from snaketune.errors import SnaketuneError

BadZipFile = zipfile.BadZipFile
ZIP_MAGIC = (b"PK\x03\x04", b"PK\x05\x06")
ZIP_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA)
ENCRYPTED = 1
# The record at the end with the longest comment; and the number of members there that stands for that and more.
LONGEST_END, MANY = 22 + 65535, 65535
HELD = 64 << 20
BYTES_PER_READ = 1 << 20


class Member(NamedTuple):
    """A file in an archive; `opening` is None for links and what else has no content of its own."""

    name: str
    opening: Opening | None


class _Place(NamedTuple):
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
        self.file, self.left = file, size

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:
        data = self.file.read(min(len(buffer), self.left))
        if self.left and buffer and not data:
            raise EOFError("the archive ends within a file")
        self.left -= len(data)
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


def zip_members(path: Path, shown: str) -> Iterator[Member]:
    """The files in a zip archive.

    Raises:
        SnaketuneError: one is encrypted, or packed in a way that isn't read here; or it is a document such as a workbook.
    """
    try:
        archive = zipfile.ZipFile(path)
    except BadZipFile as error:
        raise SnaketuneError(f"{shown} is a zip archive that is damaged or cut off: {error}; fetch it again") from None
    except NotImplementedError as error:
        raise SnaketuneError(
            f"{shown} is a zip archive that isn't unpacked here: {error}; unpack it, and name its files"
        ) from None
    with archive:
        if len(archive.infolist()) not in _numbers_of_members(path):
            raise SnaketuneError(f"{shown} is a zip archive with a damaged directory; fetch it again")
        refuse_zipped(archive.namelist(), shown)
        for info in sorted(archive.infolist(), key=lambda info: info.filename):
            if info.is_dir() and not info.file_size:
                continue
            name = f"{shown}/{printable(info.filename)}"
            if info.flag_bits & ENCRYPTED:
                raise SnaketuneError(f"{name} is encrypted; unpack it, and name the files")
            if info.compress_type not in ZIP_METHODS:
                method = zipfile.compressor_names.get(info.compress_type, info.compress_type)
                raise SnaketuneError(
                    f"{name} is packed with {method}, which isn't unpacked here; unpack it, and name the files"
                )
            yield Member(info.filename, partial(_open_zipped, archive, info, name))


def _numbers_of_members(path: Path) -> tuple[int, ...] | range:
    """How many members a zip archive says that it has, which zipfile doesn't look at; any number from MANY on."""
    with path.open("rb") as file:
        file.seek(-min(path.stat().st_size, LONGEST_END), io.SEEK_END)
        end = file.read()
    number = int.from_bytes(end[end.rfind(ZIP_MAGIC[1]) :][10:12], "little")
    return range(MANY, 1 << 62) if number == MANY else (number,)


def _open_zipped(archive: zipfile.ZipFile, info: zipfile.ZipInfo, name: str) -> BinaryIO:
    try:
        return io.BufferedReader(archive.open(info), BYTES_PER_READ)
    except NotImplementedError as error:
        raise SnaketuneError(f"{name} isn't unpacked here: {error}; unpack it, and name the files") from None


def tar_members(opening: Opening, shown: str) -> Iterator[Member]:
    """The files in a tar.

    Args:
        opening: opens it, unpacked.
        shown: its name.
    Raises:
        SnaketuneError: it is damaged or cut off.
    """
    with opening() as file:
        places, others = _places(file, shown)
        in_place = _lies_on_disk(file)
    yield from (Member(name, None) for name in others)
    ordered = sorted(places.values())
    if in_place:
        yield from (Member(place.name, partial(_open_at, opening, place)) for place in ordered)
        return
    file, position = opening(), 0
    try:
        for batch in _batches(ordered):
            if batch[0].size > HELD:
                yield Member(batch[0].name, partial(_open_at, opening, batch[0]))
                continue
            held: dict[str, bytes] = {}
            for name, offset, size in sorted(batch, key=lambda place: place.offset):
                if offset < position:
                    file.close()
                    file, position = opening(), 0
                _skip(file, offset - position)
                held[name] = _read(file, size)
                position = offset + size
            yield from (Member(place.name, partial(io.BytesIO, held.pop(place.name))) for place in batch)
    finally:
        file.close()


def _batches(places: list[_Place]) -> Iterator[list[_Place]]:
    """Places in their order, as many at once as HELD has room for, and at least one."""
    batch: list[_Place] = []
    for place in places:
        if batch and sum(held.size for held in batch) + place.size > HELD:
            yield batch
            batch = []
        batch.append(place)
    if batch:
        yield batch


def _places(file: BinaryIO, shown: str) -> tuple[dict[str, _Place], list[str]]:
    """Where the content of each file lies, and the names of links and the like. Of two with one name, the last counts."""
    places: dict[str, _Place] = {}
    others: list[str] = []
    last = ""
    try:
        with tarfile.open(fileobj=file, mode="r:" if file.seekable() else "r|", tarinfo=_Header) as archive:
            for info in archive:
                last = f" after {printable(info.name)}"
                if info.isreg() and not info.issparse():
                    places[info.name] = _Place(info.name, info.offset_data, info.size)
                elif not info.isdir():
                    others.append(info.name)
    except tarfile.TarError as error:
        raise SnaketuneError(
            f"{shown} is a tar archive that{last} is damaged or cut off: {error}; fetch it again"
        ) from None
    return places, [name for name in others if name not in places]


def _lies_on_disk(file: BinaryIO) -> bool:
    return isinstance(getattr(file, "raw", None), io.FileIO)


def _open_at(opening: Opening, place: _Place) -> BinaryIO:
    file = opening()
    if _lies_on_disk(file):
        file.seek(place.offset)
    else:
        _skip(file, place.offset)
    return io.BufferedReader(_Slice(file, place.size), BYTES_PER_READ)


def _skip(file: BinaryIO, size: int) -> None:
    while size:
        size -= len(_read(file, min(size, BYTES_PER_READ)))


def _read(file: BinaryIO, size: int) -> bytes:
    data = file.read(size)
    if len(data) < size:
        raise EOFError("the archive ends within a file")
    return data
