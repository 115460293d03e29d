"""Files that are packed with gzip, xz or zstd, unpacked while they are read."""

import gzip
import io
import lzma
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa

from snaketune.corpus.reading.formats import Opener

GZIP_MAGIC = b"\x1f\x8b"
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
XZ_MAGIC = b"\xfd7zXZ\0"
BYTES_PER_READ = 1 << 20


class _DecompressedReader(io.BufferedReader):
    """What unpacks a file, which it closes with itself."""

    def __init__(self, decompressor: BinaryIO, compressed: BinaryIO):
        super().__init__(decompressor, BYTES_PER_READ)
        self.compressed = compressed

    def close(self) -> None:
        super().close()
        self.compressed.close()


def open_raw(path: Path) -> BinaryIO:
    """The file as it lies."""
    return path.open("rb", buffering=BYTES_PER_READ)


def open_decompressed(path: Path) -> BinaryIO:
    """The file, unpacked. By content and not by suffix: downloaders like to unpack a .gz and keep its name."""
    return decompressed(lambda: open_raw(path))


def decompressed(opener: Opener) -> BinaryIO:
    """What `opening` opens, unpacked."""
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
