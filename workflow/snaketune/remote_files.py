"""Reading files where they are: local ones from disk, remote ones in parts, by fsspec's readahead cache.

In memory are the first HEAD_BYTES of the last HEADS files, since readers look at the beginning of a file several times, and
READAHEAD bytes of the file that is being read. So a file that is read once is fetched once, and a Parquet file by row groups.
A file that ends before its stated length, or isn't the same at its end, is an error.
"""

import io
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from snaketune.errors import SnaketuneError
from snaketune.locations import Facts, File, RemoteFile, explained, facts_of, filesystem

BYTES_PER_READ = 1 << 20
HEAD_BYTES, HEADS = 1 << 20, 8
READAHEAD = 8 << 20


class _Head(NamedTuple):
    """The beginning of a file. Attributes: in_parts: whether the server sends any part of it."""

    content: bytes
    in_parts: bool


class RemoteReader(io.RawIOBase):
    """A remote file, opened where its first bytes end: they are in memory."""

    def __init__(self, url: str):
        self.url, self.position, self.file, self.next = url, 0, None, 0
        self.facts: Facts = facts_of([RemoteFile(url)])[url]
        self.head = _head(url, self.facts)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        """Whether reading elsewhere fetches only what is read there."""
        return self.head.in_parts

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self.position, io.SEEK_END: self.facts.size}[whence]
        self.position = max(0, start + offset)
        return self.position

    def tell(self) -> int:
        return self.position

    def readinto(self, buffer: Any) -> int:
        size = min(len(buffer), self.facts.size - self.position)
        if size <= 0:
            return 0
        data = self.head.content[self.position : self.position + size] or self._fetched(size)
        if not data:
            check_unchanged(self.url, self.facts)
            raise SnaketuneError(
                f"{self.url} ends after {self.position:,} of its {self.facts.size:,} bytes; the transfer was cut off; run again"
            )
        self.position += len(data)
        buffer[: len(data)] = data
        if self.position == self.facts.size > len(self.head.content):
            check_unchanged(self.url, self.facts)
        return len(data)

    def _fetched(self, size: int) -> bytes:
        with explained(self.url):
            if self.file is None:
                self.file, self.next = _opened(self.url, self.facts, READAHEAD if self.head.in_parts else 0), 0
            if self.next != self.position:
                self._move()
            data = self.file.read(size)
        self.next = self.position + len(data)
        return data

    def _move(self) -> None:
        if self.head.in_parts:
            self.file.seek(self.position)
            return
        # The first bytes, which are in memory, come again.
        while self.next < self.position and (skipped := self.file.read(min(self.position - self.next, BYTES_PER_READ))):
            self.next += len(skipped)

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
            self.file = None
        super().close()


def open_file(file: File) -> BinaryIO:
    """Open a file for reading; a remote one raises SnaketuneError, also when it is read."""
    if isinstance(file, RemoteFile):
        return io.BufferedReader(RemoteReader(file.url), BYTES_PER_READ)
    return Path(file).open("rb", buffering=BYTES_PER_READ)


def is_remote_reader(file: BinaryIO) -> bool:
    """Whether any part of an open file can be fetched by itself."""
    return isinstance(raw := getattr(file, "raw", None), RemoteReader) and raw.seekable()


def check_unchanged(url: str, before: Facts) -> None:
    if facts_of([RemoteFile(url)], fresh=True)[url] != before:
        raise SnaketuneError(f"{url} changed while it was read; run again")


@lru_cache(HEADS)
def _head(url: str, facts: Facts) -> _Head:
    size = min(facts.size, HEAD_BYTES)
    with explained(url):
        if not url.startswith(("http", "hf")):
            # Without asking for its size again, as opening it does.
            return _Head(filesystem(url).cat_file(url, start=0, end=size) if size else b"", True)
        content = b""
        # Exactly what is read.
        with _opened(url, facts, HEAD_BYTES, cache_type="none") as file:
            while len(content) < size and (part := file.read(size - len(content))):
                content += part
            # Some web servers send whole files only, which shows after the first byte.
            in_parts = not url.startswith("http") or size == facts.size or _is_sent_in_parts(file)
    return _Head(content, in_parts)


def _is_sent_in_parts(file: Any) -> bool:
    try:
        file.seek(1)
        return bool(file.read(1))
    except ValueError:
        return False


def _opened(url: str, facts: Facts, block_size: int, cache_type: str = "readahead") -> Any:
    """Open a file in fsspec. Args: block_size: bytes to fetch in advance; 0 for the whole file as one stream."""
    options: dict[str, Any] = {} if block_size == 0 else {"cache_type": cache_type}
    if url.startswith("http"):
        options["size"] = facts.size
    return filesystem(url).open(url, "rb", block_size=block_size, **options)
