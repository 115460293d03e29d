"""Ctrl-C as an error message instead of a traceback; installed before imports that take long."""

import signal
import sys
from typing import Any

# The exit status that shells use for a command ended by SIGINT.
STATUS = 130


def exit_on_interrupt(number: int, frame: Any) -> None:
    """End the process like an error does, so that locks are released and child processes ended."""
    # A second Ctrl-C would interrupt that.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    print("error: interrupted; run again to resume", file=sys.stderr, flush=True)
    sys.exit(STATUS)


def install() -> None:
    """Install the handler unless SIGINT has another one, or is ignored."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, exit_on_interrupt)
