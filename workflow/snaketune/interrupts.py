"""Ctrl-C as a sentence, from the first import on; imported before anything that takes its time."""

import signal
import sys
from typing import Any

# What a shell calls a command that SIGINT ended.
STATUS = 130


def exit_on_interrupt(number: int, frame: Any) -> None:
    """Ends the process as an error does: locks are given back, processes that were started are ended."""
    # Another one would end in the middle of that.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    print("error: interrupted; run again, and it goes on where it was", file=sys.stderr, flush=True)
    sys.exit(STATUS)


def install() -> None:
    """Where the system's default is in place; a process that is told to ignore it goes on doing so."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, exit_on_interrupt)
