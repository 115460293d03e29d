"""Run a command, and end it with all its processes when standard input ends:
`python -m snaketune.sampling.supervisor COMMAND…`.

The job that starts it holds the other end of the pipe, which the system closes however the job ends, also by SIGKILL. So a
server never outlives its job, and frees its GPU.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress

SECONDS_TO_END = 20.0


def main(command: list[str]) -> int:
    # Ctrl-C and a scheduler's signals reach the job, which decides when the server ends. Ignored signals would be inherited.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, restore_signals=True)
    threading.Thread(target=_end_with_input, args=(server,), daemon=True).start()
    status = server.wait()
    _signal(server.pid, signal.SIGKILL)
    return status if status >= 0 else 128 - status


def _end_with_input(server: "subprocess.Popen[bytes]") -> None:
    # Without a buffer, whose lock a thread would hold when the process exits.
    while os.read(0, 1024):
        pass
    _signal(server.pid, signal.SIGTERM)
    time.sleep(SECONDS_TO_END)
    _signal(server.pid, signal.SIGKILL)


def _signal(group: int, number: signal.Signals) -> None:
    """Send a signal to all processes of the server, which lead a session of their own."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
