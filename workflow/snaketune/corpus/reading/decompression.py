"""Files that are packed with gzip, xz or zstd, unpacked while they are read."""

import gzip
import io
import lzma
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa

from snaketune.corpus.reading.formats import Opening

GZIP_MAGIC = b"\x1f\x8b"
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
XZ_MAGIC = b"\xfd7zXZ\0"
BYTES_PER_READ = 1 << 20


class _Unpacked(io.BufferedReader):
    """What unpacks a file, which it closes with itself."""

    def __init__(self, unpacking: BinaryIO, packed: BinaryIO):
        super().__init__(unpacking, BYTES_PER_READ)
        self.packed = packed

    def close(self) -> None:
        super().close()
        self.packed.close()


def open_file(path: Path) -> BinaryIO:
    """The file as it lies."""
    return path.open("rb", buffering=BYTES_PER_READ)


def open_unpacked(path: Path) -> BinaryIO:
    """The file, unpacked. By content and not by suffix: downloaders like to unpack a .gz and keep its name."""
    return unpacked(lambda: open_file(path))


def unpacked(opening: Opening) -> BinaryIO:
    """What `opening` opens, unpacked."""
    with opening() as file:
        magic = file.read(len(XZ_MAGIC))
    file = opening()
    if magic.startswith(GZIP_MAGIC):
        return _Unpacked(gzip.GzipFile(fileobj=file), file)
    if magic.startswith(XZ_MAGIC):
        return _Unpacked(lzma.LZMAFile(file), file)
    if magic.startswith(ZSTD_MAGIC):
        return _Unpacked(pa.CompressedInputStream(pa.PythonFile(file, "r"), "zstd"), file)
    return file
