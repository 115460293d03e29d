"""Processes that start as forks of one that has imported torch, transformers and peft, without these imports.

`start_server` starts that process, the server, which imports libraries and never snaketune, so that a fork imports the code of
its own time. `run_as_fork`, called before anything heavy is imported, has the server fork for this process's command line, and
then only passes on signals and the exit status:

    shell ── python -m snaketune sft JOB_FILE (client) ┄┄ socket ┄┄ monitor ── fork, which runs the command
                                                           server ──┘

A fork has the arguments, folder, environment, standard streams, ignored signals, umask, resource limits, priority and cores of
its client. It is killed with its client, and its session is the monitor's. The server ends with the process that started it,
forks then end by themselves, like other processes. A client that the server can't stand in for starts as usual: another user,
interpreter, cgroup or namespace (so that a scheduler counts a fork to the right job), another value of a variable that was read
during the imports, libraries installed since. Linux only. This module imports only the standard library.
"""

import atexit
import ctypes
import gc
import importlib
import json
import os
import re
import resource
import runpy
import secrets
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import IO, Any

# The server's address, and the commands that wait until it has imported its libraries; others start as usual until then, since
# only after that the server has the address with READY.
VARIABLE, READY = "SNAKETUNE_FORKS", "-ready"
# These import bitsandbytes, which initializes a GPU if torch can use one; no fork could use it then.
INITIALIZING = ("transformers.trainer", "peft.optimizers", "trl.trainer.sft_trainer", "bitsandbytes")
LIBRARIES = (
    *("torch", "torch.utils.checkpoint", "torch.nn.attention.varlen", "torch._dynamo", "transformers", "accelerate"),
    *("transformers.models.llama.modeling_llama", "transformers.utils.chat_template_utils", "safetensors.torch"),
    *("tokenizers", "sentencepiece", "pyarrow.compute", "pyarrow.parquet", "orjson", "regex", "xxhash", "pydantic"),
    *("yaml", "psutil", "jinja2", "tensorboard.compat.proto.event_pb2", *INITIALIZING),
)
# With this, torch counts GPUs without initializing one.
NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"
THREADS = tuple(f"{name}_NUM_THREADS" for name in ("OMP", "GOTO", "OPENBLAS", "MKL", "NUMEXPR", "RAYON"))
# Applied in a fork, read anew when they are needed, or of no effect on imports.
MAY_DIFFER = re.compile(
    rf"{'|'.join(THREADS)}|VECLIB_MAXIMUM_THREADS|CUDA_VISIBLE_DEVICES|PYTORCH_(CUDA_)?ALLOC_CONF|SNAKETUNE_.*|"
    "PYTHONPATH|PYTHONDONTWRITEBYTECODE|PYTHONUNBUFFERED|PATH|PWD|OLDPWD|SHLVL|COLUMNS|LINES|_"
)
# Read by libraries that aren't Python.
READ_OUTSIDE = re.compile(
    r"(LD|LC|OMP|GOMP|KMP|MKL|OPENBLAS|DNNL|ONEDNN|ATEN|MALLOC|GLIBC|CUDA|PYTORCH|PYTHON|ARROW)_?.*|LANG|TZ"
)
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
    folders = dict.fromkeys(("TMPDIR", "TMP", "TEMPDIR", "TEMP"), tempfile.gettempdir())
    command = ["bash", "-c", f'{prefix} exec python -P "$0" "$1"', __file__]
    # Closed when this process ends, however it does.
    owner, _ = os.pipe()
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as file:
        address = start_server(command, os.environ | dict.fromkeys(THREADS, "1") | folders, owner, file)
    os.close(owner)
    os.environ[VARIABLE] = " ".join((address, *waiting))


def start_server(command: list[str], variables: dict[str, str], owner: int | IO, log: IO) -> str:
    """Start the server and return its address; it ends at the end of its standard input, `owner`.

    Args:
        command: Python with this file, or with one that calls `serve`.
        variables: its environment.
    """
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


class Server:
    """The process that forks; see the module's description."""

    def __init__(self, libraries: Iterable[str]) -> None:
        self.environment, self.read = dict(os.environ), set()
        self.packages = [Path(folder) for folder in sys.path if folder.endswith("-packages")]
        self.installed = self._times()
        encode = os.environ.encodekey
        os.environ.encodekey = lambda name: (self.read.add(name), encode(name))[1]
        os.environ.setdefault(NVML, "1")
        gc.disable()
        for library in libraries:
            if not (library in INITIALIZING and has_gpu_build()):
                # Some environments lack some.
                with suppress(ImportError):
                    importlib.import_module(library)
        os.environ.encodekey = encode
        if NVML not in self.environment:
            del os.environ[NVML]
        # What they load or build when it is needed first.
        importlib.import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("llama")
        gc.collect()
        gc.freeze()
        gc.enable()
        given = [str(Path(folder).absolute()) for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        self.paths = [folder for folder in sys.path if folder and folder not in given]
        self.added = {name: value for name, value in os.environ.items() if self.environment.get(name) != value}

    def serve(self, listener: socket.socket) -> None:
        """Fork a monitor for each client until standard input ends."""
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        ready = socket.socket(socket.AF_UNIX)
        ready.bind(listener.getsockname() + READY.encode())
        ready.listen(1024)
        while 0 not in (arrived := select.select([listener, ready, 0], [], [])[0]):
            connection = arrived[0].accept()[0]
            with connection:
                if os.fork():
                    continue
                try:
                    os.setsid()
                    listener.close()
                    ready.close()
                    self.answer(connection)
                except ConnectionError:
                    pass
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(1)

    def answer(self, connection: socket.socket) -> None:
        """Read a request, fork and watch the fork; return if the request is refused or its client is gone."""
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if user_of(connection) != os.geteuid():
            return
        connection.sendall(b"r")
        text, streams, *_ = socket.recv_fds(connection, 1, 3)
        while text and (part := connection.recv(1 << 16)):
            text += part
            if text.endswith(b"\n"):
                break
        if not text:
            return
        asked = json.loads(text)
        if not self.suits(asked) or not apply(asked):
            connection.sendall(b"n")
            return
        # Both wait until they can handle signals.
        signal.pthread_sigmask(signal.SIG_BLOCK, (*SIGNALS, signal.SIGCHLD))
        if not (pid := os.fork()):
            connection.close()
            self.run(asked, streams)
        for stream in streams:
            os.close(stream)

        def report_end(*_: Any) -> None:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                with suppress(OSError):
                    connection.sendall(b"%d" % os.waitstatus_to_exitcode(status))
                os._exit(0)

        signal.signal(signal.SIGCHLD, report_end)
        with suppress(OSError):
            connection.sendall(b"y")
        # The fork's end is noticed while this waits for a signal to pass on.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (*SIGNALS, signal.SIGCHLD))
        with suppress(OSError):
            while number := connection.recv(1):
                os.kill(pid, number[0])
        os.kill(pid, signal.SIGKILL)
        while True:
            signal.pause()

    def suits(self, asked: dict[str, Any]) -> bool:
        """Whether a fork is what a new process of this client would be; the log says why not."""
        given, own = asked["environment"], self.environment
        names = {name for name in {*given, *own} if name in self.read or READ_OUTSIDE.fullmatch(name)}
        # A fork's own child processes also have what imports set.
        differing = {
            name for name in names if given.get(name) not in (own.get(name), self.added.get(name, own.get(name)))
        }
        why = sorted(name for name in differing if not MAY_DIFFER.fullmatch(name))
        if asked["same"] != json.loads(json.dumps(identity())):
            why.append("another interpreter, user, cgroup or namespace")
        if self._times() != self.installed:
            why.append("packages installed since")
        if why:
            print(f"not a fork, for {', '.join(why)}: {' '.join(asked['words'])}", flush=True)
        return not why

    def run(self, asked: dict[str, Any], streams: list[int]) -> None:
        """Run the command in this fork, as `python -m` does, and end."""
        status = 1
        try:
            die_with_parent()
            os.setpgid(0, 0)
            for number, stream in enumerate(streams):
                os.dup2(stream, number)
            os.closerange(3, 1 << 16)
            for number in SIGNALS:
                usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
                signal.signal(number, signal.SIG_IGN if number in asked["ignored"] else usual)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, (*SIGNALS, signal.SIGCHLD))
            os.environ.clear()
            os.environ.update(self.added | asked["environment"])
            streams_of(asked["streams"])
            module, *arguments = asked["words"]
            sys.argv, sys.dont_write_bytecode = ["-m", *arguments], bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
            given = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
            sys.path[:] = [asked["folder"], *given, *self.paths]
            importlib.invalidate_caches()
            # It runs as __main__, and would be there a second time only when something imports it.
            if not hasattr(sys.modules.get(module), "__path__"):
                sys.modules.pop(module, None)
            sys.modules["__main__"] = ModuleType("__main__")
            tempfile.tempdir = None
            set_threads()
            status = run_module(module)
            # What Python does at its end.
            threading._shutdown()
            atexit._run_exitfuncs()
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError, ValueError):
                    stream.flush()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)

    def _times(self) -> list[int]:
        return [folder.stat().st_mtime_ns for folder in self.packages if folder.is_dir()]


def has_gpu_build() -> bool:
    import torch

    return bool(torch.version.cuda or torch.version.hip)


def uses_gpu() -> bool:
    """Whether something in this process opened a GPU's driver."""
    opened = (os.path.realpath(link) for link in Path("/proc/self/fd").iterdir())
    return any(name.startswith(("/dev/nvidia", "/dev/kfd", "/dev/dri", "/dev/dxg")) for name in opened)


def apply(asked: dict[str, Any]) -> bool:
    """Set folder, umask, limits, priority and cores in this process; False if it may not."""
    try:
        os.chdir(asked["folder"])
        os.umask(asked["umask"])
        os.setpriority(os.PRIO_PROCESS, 0, asked["priority"])
        os.sched_setaffinity(0, asked["cores"])
        for number, limits in zip(LIMITS, asked["limits"], strict=True):
            resource.setrlimit(number, limits)
    except (OSError, ValueError):
        return False
    return True


def streams_of(settings: list[list[Any]]) -> None:
    opened = []
    for number, (encoding, errors, line_buffering, write_through) in enumerate(settings):
        stream = open(number, "w" if number else "r", encoding=encoding, errors=errors, closefd=False)  # noqa: SIM115
        stream.reconfigure(line_buffering=line_buffering, write_through=write_through)
        opened.append(stream)
    sys.stdin, sys.stdout, sys.stderr = sys.__stdin__, sys.__stdout__, sys.__stderr__ = opened


def set_threads() -> None:
    """Set what libraries took from the environment when they were imported, and draw random numbers of its own."""
    import numpy
    import pyarrow
    import torch

    threads = int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0)))
    torch.set_num_threads(threads)
    pyarrow.set_cpu_count(threads)
    numpy.random.seed()


def run_module(module: str) -> int:
    """Run a module as __main__ and return the exit status."""
    try:
        runpy._run_module_as_main(module)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        print(end.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        traceback.print_exc()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def serve(listener: int, libraries: Iterable[str] = LIBRARIES) -> None:
    """Import the libraries and serve; returns if a GPU was initialized by that, so that all processes start as usual."""
    os.set_inheritable(listener, False)
    server = Server(libraries)
    if not uses_gpu():
        server.serve(socket.socket(fileno=listener))


if __name__ == "__main__":
    serve(int(sys.argv[1]))
