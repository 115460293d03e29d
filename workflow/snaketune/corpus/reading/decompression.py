"""Files compressed with gzip, xz or zstd, decompressed while they are read."""

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
    """A reader of decompressed data that closes the compressed file, too."""

    def __init__(self, decompressor: BinaryIO, compressed: BinaryIO):
        super().__init__(decompressor, BYTES_PER_READ)
        self.compressed = compressed

    def close(self) -> None:
        super().close()
        self.compressed.close()


def open_raw(path: Path) -> BinaryIO:
    """Open a file without decompression."""
    return path.open("rb", buffering=BYTES_PER_READ)


def open_decompressed(path: Path) -> BinaryIO:
    """Open a file decompressed; by content, not by suffix, because some downloaders decompress a .gz and keep its name."""
    return decompressed(lambda: open_raw(path))


def decompressed(opener: Opener) -> BinaryIO:
    """Decompress what `opener` opens."""
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
