"""Run `python -m MODULE ...` in a fork of server.py, and everything else in Python itself."""

import json
import os
import resource
import signal
import socket
import sys
import time
from pathlib import Path

PYTHON, SOCKET, SHIM, *ARGUMENTS = sys.argv[1:]
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def main() -> None:
    ignored = [int(number) for number in FORWARDED if signal.getsignal(number) == signal.SIG_IGN]
    umask = os.umask(0)
    os.umask(umask)
    request = {
        "arguments": ARGUMENTS[ARGUMENTS.index("-m") :],
        "executable": SHIM,
        "folder": str(Path.cwd()),
        "environment": dict(os.environ),
        "ignored": ignored,
        "umask": umask,
        "file_size": resource.getrlimit(resource.RLIMIT_FSIZE),
    }
    text = json.dumps(request).encode() + b"\n"
    if server := connected():
        run(server, text)
    for number in FORWARDED:
        signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)


def run(server: socket.socket, text: bytes) -> None:
    """End as the server's fork does; return if the server refuses the request."""
    for number in FORWARDED:
        signal.signal(number, lambda number, _: server.send(bytes([number])))
    sent = socket.send_fds(server, [text], [0, 1, 2])
    if sent < len(text):
        server.sendall(text[sent:])
    answer = b""
    while not answer.endswith(b"\n"):
        part = server.recv(64)
        if not part:
            sys.exit("the server that forks for tests is gone")
        answer += part
    if answer == b"refused\n":
        return
    status = int(answer)
    if status < 0:
        signal.signal(-status, signal.SIG_DFL) if -status in FORWARDED else None
        os.kill(os.getpid(), -status)
    os._exit(status)


def connected() -> socket.socket | None:
    server = socket.socket(socket.AF_UNIX)
    # The server opens its socket at once, and answers when it has imported its libraries.
    for _ in range(100):
        try:
            server.connect(SOCKET)
            return server
        except FileNotFoundError:
            time.sleep(0.05)
        except OSError:
            return None
    return None


if __name__ == "__main__":
    # torchrun starts its workers unbuffered.
    if ARGUMENTS[:1] == ["-m"] or ARGUMENTS[:2] == ["-u", "-m"]:
        main()
    os.execv(PYTHON, [PYTHON, *ARGUMENTS])
