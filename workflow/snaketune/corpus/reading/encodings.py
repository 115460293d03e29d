"""Text in other encodings than UTF-8: converted if the source names the encoding, else detected for the error message."""

import codecs
import io
import re
from typing import BinaryIO

from snaketune.errors import SnaketuneError

UTF_8 = "utf-8"
BYTES_PER_READ = 1 << 20
# Replaces bytes that the encoding has no character for: invalid UTF-8, so that the row is malformed.
INVALID_BYTE = b"\xff"
ERRORS = "snaketune.no_character"
BYTE_ORDER_MARKS = {b"\xff\xfe\0\0": "utf-32", b"\0\0\xfe\xff": "utf-32", b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16"}
# Which of four bytes are zero in English text.
ZERO_BYTES = {(1, 2, 3): "utf-32-le", (0, 1, 2): "utf-32-be", (1, 3): "utf-16-le", (0, 2): "utf-16-be"}
# Western languages don't have three such characters in a row.
THREE_NON_ASCII = re.compile(rb"[\x80-\xff]{3}")
MIN_BYTES, BYTES_CHECKED = 16, 500


def _replace_invalid(error: UnicodeError) -> tuple[str | bytes, int]:
    return ("\udcff" if isinstance(error, UnicodeDecodeError) else INVALID_BYTE), error.end


codecs.register_error(ERRORS, _replace_invalid)


class _AsUtf8(io.RawIOBase):
    def __init__(self, file: BinaryIO, encoding: str, display_name: str):
        self.file, self.display_name, self.encoding, self.pending = file, display_name, encoding, b""
        self.decoder = codecs.getincrementaldecoder(encoding)(ERRORS)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:
        data = b"more"
        while data and not self.pending:
            data = self.file.read(BYTES_PER_READ)
            try:
                text = self.decoder.decode(data, final=not data)
            except UnicodeError as error:
                # The whole file is affected, not one character: for instance UTF-16 without its byte order mark.
                raise SnaketuneError(f"{self.display_name}: {wrong_encoding(self.encoding)}: {error}") from None
            self.pending = text.encode("utf-8", ERRORS)
        chunk = self.pending[: len(buffer)]
        self.pending = self.pending[len(buffer) :]
        buffer[: len(chunk)] = chunk
        return len(chunk)

    def close(self) -> None:
        self.file.close()
        super().close()


def as_utf8(file: BinaryIO, encoding: str, display_name: str) -> BinaryIO:
    """Convert a file in another encoding to UTF-8. Bytes that the encoding has no character for become invalid UTF-8."""
    return io.BufferedReader(_AsUtf8(file, encoding, display_name), BYTES_PER_READ)


def other_unicode(head: bytes) -> str | None:
    """Return UTF-16 or UTF-32 if a file begins like text in it, else None.

    >>> other_unicode("some text".encode("utf-16-be"))
    'utf-16-be'
    """
    for mark, encoding in BYTE_ORDER_MARKS.items():
        if head.startswith(mark):
            return encoding
    start = head[: min(len(head), BYTES_CHECKED) // 4 * 4]
    if len(start) < MIN_BYTES:
        return None
    return ZERO_BYTES.get(tuple(offset for offset in range(4) if start[offset::4].count(0) > len(start) / 8))


def advice(data: bytes) -> str:
    """Return what to do about text that isn't UTF-8.

    >>> advice("schön".encode("latin-1"))
    'if the file is in Windows-1252, set `encoding: cp1252` of its source to have it read as that'
    """
    if not data.decode("utf-8", "ignore").isascii():
        return "other text in it is; fix it, or fetch the file again"
    if may_be_western(data):
        return "if the file is in Windows-1252, set `encoding: cp1252` of its source to have it read as that"
    return "if the file is in another encoding, set the `encoding` of its source to have it read as that"


def may_be_western(data: bytes) -> bool:
    """Return True if bytes that aren't UTF-8 look like Windows-1252, of which Latin-1 is a part.

    >>> may_be_western("schön".encode("latin-1")), may_be_western("текст".encode("koi8-r"))
    (True, False)
    """
    try:
        data.decode("cp1252")
    except UnicodeDecodeError:
        return False
    return b"\0" not in data and not THREE_NON_ASCII.search(data)


def wrong_encoding(encoding: str) -> str:
    """Describe text that isn't in the encoding that its source names."""
    return f"not all of it is in {encoding}, the source's `encoding`"
