"""Files that are one document each, in pieces where they are long.

A document longer than LONGEST characters is cut into several, so that nothing has to hold a file of a gigabyte at once:
after its last blank line within that length, else after its last line, else its last word. Laid end to end, the pieces are
the document. Each is a row of its own, so the share held out of a single long file is a share of its pieces.
"""

import io
from collections.abc import Iterator
from typing import Any

from snaketune.corpus.excerpts import EXCERPT_LENGTH
from snaketune.corpus.raw_rows import RawRow
from snaketune.corpus.reading.encodings import advice
from snaketune.corpus.reading.formats import Opener
from snaketune.corpus.rows import TEXT, Malformed

# As many rows as a batch has, twice over, of four bytes per character, are still less than the 2 GB that Arrow holds in one.
MAX_CHARACTERS = 250_000
# A cut before the middle would make many short pieces of what happens to begin with a heading.
SEPARATORS = ("\n\n", "\n", " ")


def chunk_end(text: str) -> int:
    """How much of a text its first piece takes.

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
    """A file that is one document, in pieces where it is long; each with the line that it begins on.

    Args:
        opening: opens the file at its beginning.
        shown: its name, for the log.
    """
    # Bytes that aren't UTF-8 survive as lone surrogates, so that they cost their piece and not the file.
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
            print(f"{display_name} is a long document, read in {chunks} pieces", flush=True)


def _checked(chunk: str) -> dict[str, Any] | Malformed:
    if not chunk.isascii() and any("\udc80" <= character <= "\udcff" for character in chunk):
        why = f"the text isn't UTF-8; {advice(chunk.encode(errors='surrogateescape'))}"
        return Malformed("not_utf8", why, chunk[:EXCERPT_LENGTH])
    return {TEXT: chunk}
