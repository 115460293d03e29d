"""Compressed files, and files in zip and tar archives, in order of name.

Members of a zip, or of an uncompressed tar on disk, are read where they lie. Any other tar can only be read from its start, so
it is copied, uncompressed, to a temporary file, which has no name and ends with the reading. No member is extracted.
"""

import errno
import gzip
import io
import lzma
import shutil
import tarfile
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from functools import partial
from tempfile import TemporaryFile, gettempdir
from typing import IO, BinaryIO, NamedTuple

import pyarrow as pa

from snaketune.corpus.excerpts import printable
from snaketune.corpus.reading.formats import Opener, refuse_zipped
from snaketune.errors import SnaketuneError
from snaketune.locations import File, size_of
from snaketune.remote_files import BYTES_PER_READ, open_file

BadZipFile, TarError = zipfile.BadZipFile, tarfile.TarError
GZIP_MAGIC, ZSTD_MAGIC, XZ_MAGIC = b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"\xfd7zXZ\0"
ZIP_MAGIC = (b"PK\x03\x04", b"PK\x05\x06")
ZIP_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA)
ENCRYPTED = 1
# The largest end record, one with the longest comment; and the member count that stands for itself and any larger one.
MAX_END_RECORD, COUNT_OVERFLOW = 22 + 65535, 65535
UNPACK = "unpack it, and name its files"


class Member(NamedTuple):
    """A file in an archive; `opener` is None for links and other members without content."""

    name: str
    opener: Opener | None


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
    """Yield the files in a tar; of several with one name, the last.

    Raises:
        SnaketuneError: it is damaged or cut off, or a compressed one doesn't fit on the disk for temporary files.
    """
    files: dict[str, tarfile.TarInfo] = {}
    others: list[str] = []
    last = ""
    with opener() as file, ExitStack() as stack:
        on_disk: IO[bytes] = file
        if not isinstance(getattr(file, "raw", None), io.FileIO):
            on_disk = stack.enter_context(TemporaryFile())
            _copy(file, on_disk, display_name)
        try:
            archive = stack.enter_context(tarfile.open(fileobj=on_disk, mode="r:", tarinfo=_Header))
            for info in archive:
                last = f" after {printable(info.name)}"
                if info.isreg() and not info.issparse():
                    files[info.name] = info
                elif not info.isdir():
                    others.append(info.name)
        except TarError as error:
            what = f"is a tar archive that is damaged or cut off{last}: {error}; fetch it again"
            raise SnaketuneError(f"{display_name} {what}") from None
        yield from (Member(name, None) for name in others if name not in files)
        yield from (Member(name, partial(archive.extractfile, files[name])) for name in sorted(files))


def _copy(file: BinaryIO, copy: IO[bytes], display_name: str) -> None:
    try:
        shutil.copyfileobj(file, copy, BYTES_PER_READ)
        copy.seek(0)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        # What is still in memory doesn't fit either.
        with suppress(OSError):
            copy.close()
        what = f"doesn't fit uncompressed in {gettempdir()}; set TMPDIR to a folder with more room, or {UNPACK}"
        raise SnaketuneError(f"{display_name} is a tar archive that {what}") from None
