"""Processes that start as forks of one that has imported torch, transformers and peft, without these imports.

`start_server` starts that process, the server (`fork_server`), which imports libraries and never snaketune, so that a fork
imports the code of its own time. `run_as_fork`, called before anything heavy is imported, has the server fork for this
process's command line, and then only passes on signals and the exit status:

    shell ── python -m snaketune sft JOB_FILE (client) ┄┄ socket ┄┄ monitor ── fork, which runs the command
                                                           server ──┘

A fork has the arguments, folder, environment, standard streams, ignored signals, umask, resource limits, priority and cores of
its client. It is killed with its client, and its session is the monitor's. The server ends with the process that started it,
forks then end by themselves, like other processes. A client that the server can't stand in for starts as usual: another user,
interpreter, cgroup or namespace (so that a scheduler counts a fork to the right job), another value of a variable that was read
during the imports, libraries installed since. Linux only. This module imports only the standard library.
"""

import json
import os
import resource
import signal
import socket
import struct
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

SERVER = Path(__file__).with_name("fork_server.py")
# The server's address, and the commands that wait until it has imported its libraries; others start as usual until then, since
# only after that the server has the address with READY.
VARIABLE, READY = "SNAKETUNE_FORKS", "-ready"
THREADS = tuple(f"{name}_NUM_THREADS" for name in ("OMP", "GOTO", "OPENBLAS", "MKL", "NUMEXPR", "RAYON"))
SIGNALS = (
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2),
    *(signal.SIGTSTP, signal.SIGCONT),
)
LIMITS = [number for name, number in vars(resource).items() if name.startswith("RLIMIT_")]
# prctl(2)
PR_SET_PDEATHSIG = 1


def fork_jobs(prefix: str, waiting: Iterable[str], log: Path) -> None:
    """Start a server for the jobs of this process, with which it ends; jobs find it by VARIABLE. An address that VARIABLE
    already holds is kept.

    Args:
        prefix: shell commands that set the environment of jobs.
        waiting: the commands that wait for the server.
    """
    if sys.platform != "linux" or VARIABLE in os.environ:
        return
    command = ["bash", "-c", f'{prefix} exec python -P "$0" "$1"', str(SERVER)]
    # Closed when this process ends, however it does.
    owner, _ = os.pipe()
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as file:
        address = start_server(command, os.environ | dict.fromkeys(THREADS, "1"), owner, file)
    os.close(owner)
    os.environ[VARIABLE] = " ".join((address, *waiting))


def start_server(command: list[str], variables: dict[str, str], owner: int | IO, log: IO) -> str:
    """Start the server and return its address; it ends at the end of its standard input, `owner`.

    Args:
        command: Python with SERVER, or with a file that calls its `serve`.
        variables: its environment.
    """
    # Here, as in `die_with_parent`: a client does without, and starts in 20 ms instead of 28.
    import secrets
    import subprocess

    listener, address = socket.socket(socket.AF_UNIX), f"snaketune-{secrets.token_hex(16)}"
    # Abstract: no file that a killed server would leave. Clients wait in its queue during the imports.
    with listener:
        listener.bind(f"\0{address}")
        listener.listen(1024)
        number = listener.fileno()
        streams = {"stdin": owner, "stdout": log, "stderr": log}
        subprocess.Popen([*command, str(number)], env=variables, pass_fds=[number], start_new_session=True, **streams)
    return address


def die_with_parent() -> None:
    """On Linux, have the kernel kill this process when its parent dies, since no other process would end it then."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def run_as_fork(words: list[str], *, waits: bool = False) -> None:
    """Run `python -m WORDS` in a fork and end as it does; return if this process is to run it itself.

    Args:
        waits: whether to wait for a server that still imports its libraries, as the commands that VARIABLE names do.
    """
    address, *heavy = os.environ.get(VARIABLE, "").split() or [""]
    # Nothing else has imported torch so early: this process is a fork.
    if not address or "torch" in sys.modules or None in (sys.stdin, sys.stdout, sys.stderr):
        return
    waits = waits or not set(heavy).isdisjoint(words[:2])
    with socket.socket(socket.AF_UNIX) as server:
        # Signals that arrive before the fork exists wait.
        try:
            server.connect(f"\0{address}{'' if waits else READY}")
            if user_of(server) != os.geteuid() or not server.recv(1):
                return
            signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
            socket.send_fds(server, [b"\n"], [0, 1, 2])
            server.sendall(json.dumps(request(words)).encode() + b"\n")
            if server.recv(1) != b"y":
                return
            for number in SIGNALS:
                signal.signal(number, lambda number, _: forward(server, number))
        except OSError:
            return
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        answer = b""
        with suppress(OSError):
            while part := server.recv(64):
                answer += part
        end_like(int(answer) if answer else 1)


def request(words: list[str]) -> dict[str, Any]:
    umask = os.umask(0)
    os.umask(umask)
    return {
        "words": words,
        "same": identity(),
        "environment": dict(os.environ),
        "folder": str(Path.cwd()),
        "ignored": [number for number in SIGNALS if signal.getsignal(number) == signal.SIG_IGN],
        "umask": umask,
        "limits": [resource.getrlimit(number) for number in LIMITS],
        "priority": os.getpriority(os.PRIO_PROCESS, 0),
        "cores": sorted(os.sched_getaffinity(0)),
        "streams": [
            [stream.encoding, stream.errors, stream.line_buffering, stream.write_through]
            for stream in (sys.stdin, sys.stdout, sys.stderr)
        ],
    }


def identity() -> list[Any]:
    """Return what a client and its server have in common: interpreter, options, user, groups, cgroup, namespaces and root."""
    python = [sys.version, sys.prefix, sys.flags.optimize, sys.flags.utf8_mode, sys.warnoptions, sorted(sys._xoptions)]
    users = [*os.getresuid(), *os.getresgid(), *sorted(os.getgroups())]
    own = Path("/proc/self")
    links = [str((own / name).readlink()) for name in ("exe", "root", "ns/pid", "ns/mnt", "ns/net", "ns/user")]
    return [python, users, links, (own / "cgroup").read_text()]


def user_of(connection: socket.socket) -> int:
    """Return the effective user of the process at the other end."""
    return struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1]


def forward(server: socket.socket, number: int) -> None:
    with suppress(OSError):
        server.send(bytes([signal.SIGSTOP if number == signal.SIGTSTP else number]))
    if number == signal.SIGTSTP:
        os.kill(os.getpid(), signal.SIGSTOP)


def end_like(status: int) -> None:
    """End with an exit status, or by the signal -status, and without a second core file."""
    if status < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -status not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)
