"""The text of a JSON file, read block by block: values are decoded from what was read, and their text is then dropped."""

import codecs
import json
import re
from collections.abc import Iterator
from typing import Any, BinaryIO

from snaketune.corpus.reading.encodings import advice
from snaketune.corpus.reading.json_values import DECODER, not_json
from snaketune.corpus.rows import Malformed

BLOCK = 1 << 20
BLANKS = re.compile(r"[ \t\n\r]*")
# A literal, a number or an escape that the end of a block cuts gives an error, or another number, at most so far before it.
CUT_LENGTH = 16
# Finds the end of a value that DECODER refuses for a key that is there twice.
LENIENT = json.JSONDecoder()


class JsonText:
    """A text with a position, which each reading moves on.

    Attributes:
        text: what was read of the file and isn't dropped yet; `position` is within it.
        size: bytes read of the file.
        line, column: where in the file `text` begins, from 1.
    """

    def __init__(self, file: BinaryIO):
        self.file, self.decoder = file, codecs.getincrementaldecoder("utf-8-sig")()
        self.text, self.position, self.size, self.line, self.column = "", 0, 0, 1, 1

    def next(self) -> str:
        """Return the next character that isn't blank; "" at the end of the file."""
        while True:
            self.position = BLANKS.match(self.text, self.position).end()
            if self.position < len(self.text) or not self._read_block():
                return self.text[self.position : self.position + 1]

    def value(self, name: str = "") -> Any:
        """Read a value; return Malformed for one with an object that has a key twice.

        Args:
            name: of the value, for errors.
        Raises:
            Malformed: it isn't JSON or not UTF-8.
        """
        self.next()
        while True:
            try:
                value, end = self._decoded()
            except (ValueError, RecursionError) as error:
                if not self._may_be_cut(error) or not self._read_block():
                    raise self._malformed(error, name) from None
            else:
                # A number may continue in the next block.
                if end + CUT_LENGTH < len(self.text) or not self._read_block():
                    self.position = end
                    return value

    def elements(self) -> Iterator[Any]:
        """Read the elements of the array that is next. Raises what `value` raises."""
        for number in self._items("]", "row"):
            yield self.value(f"row {number}")

    def members(self) -> Iterator[str]:
        """Read the keys of the object that is next; the caller reads the value of each. Raises what `value` raises."""
        for _ in self._items("}"):
            key = self.value()
            if not isinstance(key, str) or self.next() != ":":
                raise self._malformed(json.JSONDecodeError("Expecting a key and a colon", self.text, self.position))
            self.position += 1
            yield key

    def _items(self, closing: str, name: str = "") -> Iterator[int]:
        """Yield the number of each item of the array or object that is next, before the caller reads the item."""
        self.next()
        self.position += 1
        number = 0
        if self.next() == closing:
            self.position += 1
            return
        while True:
            number += 1
            yield number
            found = self.next()
            if found not in (",", closing):
                error = json.JSONDecodeError("Expecting ',' delimiter", self.text, self.position)
                raise self._malformed(error, name and f"{name} {number}")
            self.position += 1
            if found == closing:
                return

    def _decoded(self) -> tuple[Any, int]:
        try:
            return DECODER.raw_decode(self.text, self.position)
        except Malformed as error:
            return error, LENIENT.raw_decode(self.text, self.position)[1]

    def _read_block(self) -> bool:
        """Read more of the file, and drop the text before the position; return False at the end of the file."""
        # Twice as much each time, so that a value of many blocks is decoded only a few times.
        block = self.file.read(max(BLOCK, len(self.text) - self.position))
        self.size += len(block)
        try:
            more = self.decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            number = self.size - len(error.object) + error.start + 1
            raise Malformed("not_utf8", f"byte {number} isn't UTF-8 ({error.reason}); {advice(error.object)}") from None
        if block:
            self.line, self.column = self._place(self.position)
            self.text, self.position = self.text[self.position :] + more, 0
        return bool(block)

    def _place(self, position: int) -> tuple[int, int]:
        """Return line and column in the file of a position in the text."""
        found = json.JSONDecodeError("", self.text, position)
        return self.line + found.lineno - 1, found.colno + (self.column - 1 if found.lineno == 1 else 0)

    def _may_be_cut(self, error: Exception) -> bool:
        """Whether an error of the decoder may be from the end of the text, where the file may continue."""
        if not isinstance(error, json.JSONDecodeError):
            return False
        return "Unterminated" in error.msg or error.pos + CUT_LENGTH > len(self.text)

    def _malformed(self, error: ValueError | RecursionError, name: str = "") -> Malformed:
        if isinstance(error, json.JSONDecodeError):
            if name and ("Unterminated" in error.msg or error.pos == len(self.text)):
                return Malformed("not_json", f"it ends within {name}")
            line, column = self._place(error.pos)
            error = ValueError(f"{error.msg}: line {line} column {column}")
        malformed = not_json(error, self.text[self.position :])
        malformed.detail = f"{name}: {malformed.detail}" if name else malformed.detail
        return malformed
