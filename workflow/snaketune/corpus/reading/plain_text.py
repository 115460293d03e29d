"""Files of one document each, cut into chunks if they are long.

A document of more than MAX_CHARACTERS characters is cut, so that no file of a gigabyte has to be in memory: after the last
blank line within that length, else after the last line, else the last word. Concatenated, the chunks are the document. Each
is a row of its own, so the held-out share of a single long file is a share of its chunks.
"""

import io
from collections.abc import Iterator
from typing import Any

from snaketune.corpus.excerpts import EXCERPT_LENGTH
from snaketune.corpus.raw_rows import RawRow
from snaketune.corpus.reading.encodings import advice
from snaketune.corpus.reading.formats import Opener
from snaketune.corpus.rows import TEXT, Malformed

# Two batches of rows of this length, at four bytes per character, are below the 2 GB limit of an Arrow array.
MAX_CHARACTERS = 250_000
# Cuts are in the second half only: a text that begins with headings would give many short chunks.
SEPARATORS = ("\n\n", "\n", " ")


def chunk_end(text: str) -> int:
    """Return the length of the first chunk of a text.

    >>> chunk_end("word " * 60_000), chunk_end("word")
    (250000, 4)
    """
    if len(text) <= MAX_CHARACTERS:
        return len(text)
    for separator in SEPARATORS:
        position = text.rfind(separator, MAX_CHARACTERS // 2, MAX_CHARACTERS)
        if position >= 0:
            return position + len(separator)
    return MAX_CHARACTERS


def read_text(opener: Opener, display_name: str) -> Iterator[RawRow]:
    """Read a file that is one document, in chunks if it is long; each with the line that it begins on.

    Args:
        opener: opens the file at its beginning.
        display_name: its name in the log.
    """
    # Bytes that aren't UTF-8 become lone surrogates, so that they make one chunk malformed instead of failing the file.
    with io.TextIOWrapper(opener(), encoding="utf-8-sig", errors="surrogateescape", newline="") as lines:
        text, line, chunks = "", 1, 0
        while True:
            more = lines.read(MAX_CHARACTERS + 1 - len(text)) if len(text) <= MAX_CHARACTERS else ""
            text += more
            if not text:
                break
            end = chunk_end(text)
            chunk, text = text[:end], text[end:]
            chunks += 1
            yield RawRow("line", line, _checked(chunk))
            line += chunk.count("\n")
        if chunks > 1:
            print(f"{display_name} is a long document, read in {chunks} chunks", flush=True)


def _checked(chunk: str) -> dict[str, Any] | Malformed:
    if not chunk.isascii() and any("\udc80" <= character <= "\udcff" for character in chunk):
        detail = f"the text isn't UTF-8; {advice(chunk.encode(errors='surrogateescape'))}"
        return Malformed("not_utf8", detail, chunk[:EXCERPT_LENGTH])
    return {TEXT: chunk}
