"""Output of this process without control characters, which terminals interpret, and without secrets.

Messages quote data, names of files and tensors, configs of models, answers of servers and errors of libraries. So they are
escaped where they leave the process, in its two streams and in Snakemake's log, and not where each is written.
"""

import io
import logging
import sys

from snaketune.config.secrets import without_secrets
from snaketune.errors import printable


def escaped(text: str) -> str:
    r"""Escape a text except for line breaks and tabs, and mask secrets in it.

    A carriage return at the beginning stays, as progress bars begin with one; where a line begins, it moves nothing.

    >>> escaped("\ra\tb\n\x1b[31m\r\x9b")
    '\ra\tb\n\\u001b[31m\\r\\u009b'
    """
    text = without_secrets(text.replace("\r\n", "\n"))
    if text.isprintable():
        return text
    start, rest = text[: text.startswith("\r")], text.removeprefix("\r")
    return start + "".join(c if c in "\n\t" else printable(c) for c in rest)


class EscapedStream(io.TextIOWrapper):
    """A text stream that escapes what is written to it, and what its encoding doesn't have."""

    def write(self, text: str) -> int:
        super().write(escaped(text))
        return len(text)


def escape_output() -> None:
    """Replace standard output and standard error by streams that escape, unless they were replaced already; `sys.__stdout__`
    is still the original one."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not getattr(sys, f"__{name}__") or stream is None:
            continue
        stream.reconfigure(errors="backslashreplace")
        settings = {key: getattr(stream, key) for key in ("encoding", "errors", "line_buffering", "write_through")}
        setattr(sys, name, EscapedStream(stream.buffer, **settings))


def escape_record(record: logging.LogRecord) -> bool:
    """Escape the message of a log record. A filter for loggers, which retains all records."""
    if isinstance(record.msg, str):
        record.msg = escaped(record.msg)
    return True
