"""Compressed files, and files in zip and tar archives, in order of name: read in place, and nothing is written to disk.

A member of a zip, or of an uncompressed tar, is read at its offset. A compressed tar can only be read from its start, so its
members are decompressed into memory, up to BUFFER_BYTES at a time; only a member larger than that is decompressed anew each
time it is opened. One pass is enough for an archive whose members are in order of name, as `tar --sort=name` writes them.
"""

import gzip
import io
import lzma
import tarfile
import zipfile
from collections.abc import Iterator
from functools import partial
from typing import BinaryIO, NamedTuple

import pyarrow as pa

from snaketune.corpus.excerpts import printable
from snaketune.corpus.reading.formats import Opener, refuse_zipped
from snaketune.errors import SnaketuneError
from snaketune.locations import File, size_of
from snaketune.remote_files import BYTES_PER_READ, is_remote_reader, open_file

BadZipFile = zipfile.BadZipFile
GZIP_MAGIC, ZSTD_MAGIC, XZ_MAGIC = b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"\xfd7zXZ\0"
ZIP_MAGIC = (b"PK\x03\x04", b"PK\x05\x06")
ZIP_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA)
ENCRYPTED = 1
# The largest end record, one with the longest comment; and the member count that stands for itself and any larger one.
MAX_END_RECORD, COUNT_OVERFLOW = 22 + 65535, 65535
UNPACK = "unpack it, and name its files"
BUFFER_BYTES = 64 << 20


class Member(NamedTuple):
    """A file in an archive; `opener` is None for links and other members without content."""

    name: str
    opener: Opener | None


class _TarEntry(NamedTuple):
    name: str
    offset: int
    size: int


class _DecompressedReader(io.BufferedReader):
    """A reader of decompressed data that closes the compressed file, too."""

    def __init__(self, decompressor: BinaryIO, compressed: BinaryIO):
        super().__init__(decompressor, BYTES_PER_READ)
        self.compressed = compressed

    def close(self) -> None:
        super().close()
        self.compressed.close()


def open_decompressed(path: File) -> BinaryIO:
    """Open a file decompressed; by content, not by suffix, because some downloaders decompress a .gz and keep its name."""
    return decompressed(lambda: open_file(path))


def decompressed(opener: Opener) -> BinaryIO:
    with opener() as file:
        magic = file.read(len(XZ_MAGIC))
    file = opener()
    if magic.startswith(GZIP_MAGIC):
        return _DecompressedReader(gzip.GzipFile(fileobj=file), file)
    if magic.startswith(XZ_MAGIC):
        return _DecompressedReader(lzma.LZMAFile(file), file)
    if magic.startswith(ZSTD_MAGIC):
        return _DecompressedReader(pa.CompressedInputStream(pa.PythonFile(file, "r"), "zstd"), file)
    return file


class _Header(tarfile.TarInfo):
    """A tar header; tarfile takes a damaged one for the end of the archive and drops what follows."""

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


def is_zip(path: File) -> bool:
    with open_file(path) as file:
        return file.read(4) in ZIP_MAGIC


def is_tar(head: bytes) -> bool:
    """Return True if a file begins with a tar header whose checksum is right."""
    try:
        tarfile.TarInfo.frombuf(head[: tarfile.BLOCKSIZE], "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        return False
    return True


def zip_members(path: File, display_name: str) -> Iterator[Member]:
    """Yield the files in a zip archive.

    Raises:
        SnaketuneError: the archive is damaged, a member is encrypted or has an unsupported compression, or the archive is a
            document such as a workbook.
    """
    file = open_file(path)
    if not file.seekable():
        raise SnaketuneError(f"{display_name}: the server sends whole files only; download it, and name the local file")
    try:
        archive = zipfile.ZipFile(file)
    except (BadZipFile, NotImplementedError) as error:
        damaged = isinstance(error, BadZipFile)
        what = f"is damaged or cut off: {error}; fetch it again" if damaged else f"can't be read: {error}; {UNPACK}"
        raise SnaketuneError(f"{display_name} is a zip archive that {what}") from None
    with file, archive:
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
                what = f"is compressed with {method}, which isn't supported; unpack it, and name the files"
                raise SnaketuneError(f"{name} {what}")
            yield Member(info.filename, partial(_open_zipped, archive, info, name))


def _recorded_counts(path: File) -> tuple[int, ...] | range:
    """Return the member counts that the end record of a zip archive allows; zipfile doesn't check them."""
    with open_file(path) as file:
        file.seek(-min(size_of(path), MAX_END_RECORD), io.SEEK_END)
        end = file.read()
    number = int.from_bytes(end[end.rfind(ZIP_MAGIC[1]) :][10:12], "little")
    return range(COUNT_OVERFLOW, 1 << 62) if number == COUNT_OVERFLOW else (number,)


def _open_zipped(archive: zipfile.ZipFile, info: zipfile.ZipInfo, name: str) -> BinaryIO:
    try:
        return io.BufferedReader(archive.open(info), BYTES_PER_READ)
    except NotImplementedError as error:
        raise SnaketuneError(f"{name} can't be decompressed: {error}; unpack it, and name the files") from None


def tar_members(opener: Opener, display_name: str) -> Iterator[Member]:
    """Yield the files in a tar.

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
    """Yield consecutive entries of up to BUFFER_BYTES together, at least one at a time."""
    batch: list[_TarEntry] = []
    for entry in entries:
        if batch and sum(member.size for member in batch) + entry.size > BUFFER_BYTES:
            yield batch
            batch = []
        batch.append(entry)
    if batch:
        yield batch


def _tar_entries(file: BinaryIO, display_name: str) -> tuple[dict[str, _TarEntry], list[str]]:
    """Return the entry of each file by name, the last if a name occurs twice; and the names of links and the like."""
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
        what = f"is a tar archive that is damaged or cut off{last}: {error}; fetch it again"
        raise SnaketuneError(f"{display_name} {what}") from None
    return entries, [name for name in others if name not in entries]


def _is_on_disk(file: BinaryIO) -> bool:
    return isinstance(getattr(file, "raw", None), io.FileIO)


def _open_at(opener: Opener, entry: _TarEntry) -> BinaryIO:
    file = opener()
    if _is_on_disk(file) or is_remote_reader(file):
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
