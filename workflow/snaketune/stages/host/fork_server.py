"""The server of `forks`: a process that imports torch, transformers and peft, and forks for the command lines of its clients.

It runs as a file and loads `forks` and `threads` beside it by path: the package must not be imported here, since a fork imports
the code of its own time.
"""

import atexit
import gc
import importlib
import json
import os
import re
import resource
import runpy
import select
import signal
import socket
import sys
import tempfile
import threading
import traceback
import weakref
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

forks, threads = (
    SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name(name)))) for name in ("forks.py", "threads.py")
)
# These import bitsandbytes, which initializes a GPU if torch can use one; no fork could use it then.
INITIALIZING = ("transformers.trainer", "peft.optimizers", "trl.trainer.sft_trainer", "bitsandbytes")
LIBRARIES = (
    *("torch", "torch.utils.checkpoint", "torch.nn.attention.varlen", "torch._dynamo", "transformers", "accelerate"),
    *("transformers.models.llama.modeling_llama", "transformers.utils.chat_template_utils", "safetensors.torch"),
    *("tokenizers", "sentencepiece", "pyarrow.compute", "pyarrow.parquet", "orjson", "regex", "xxhash", "pydantic"),
    *("yaml", "psutil", "jinja2", "torch.utils.tensorboard", *INITIALIZING),
)
# With this, torch counts GPUs without initializing one.
NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"
# Applied in a fork, read anew when they are needed, or of no effect on imports.
MAY_DIFFER = re.compile(
    rf"{'|'.join(forks.THREADS)}|VECLIB_MAXIMUM_THREADS|CUDA_VISIBLE_DEVICES|PYTORCH_(CUDA_)?ALLOC_CONF|SNAKETUNE_.*|"
    "TMPDIR|TMP|TEMP|PYTHONPATH|PYTHONDONTWRITEBYTECODE|PYTHONUNBUFFERED|PATH|PWD|OLDPWD|SHLVL|COLUMNS|LINES|_"
)
# Read by libraries that aren't Python.
READ_OUTSIDE = re.compile(
    r"(LD|LC|OMP|GOMP|KMP|MKL|OPENBLAS|DNNL|ONEDNN|ATEN|MALLOC|GLIBC|CUDA|PYTORCH|PYTHON|ARROW)_?.*|LANG|TZ"
)


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
        # What was made here stays: a fork that ends would delete temporary folders, and torch's operators one by one.
        for finalizer in list(weakref.finalize._registry):
            finalizer.atexit = False
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
        ready.bind(listener.getsockname() + forks.READY.encode())
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
        if forks.user_of(connection) != os.geteuid():
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
        signal.pthread_sigmask(signal.SIG_BLOCK, (*forks.SIGNALS, signal.SIGCHLD))
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
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (*forks.SIGNALS, signal.SIGCHLD))
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
        if asked["same"] != json.loads(json.dumps(forks.identity())):
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
            forks.die_with_parent()
            os.setpgid(0, 0)
            for number, stream in enumerate(streams):
                os.dup2(stream, number)
            os.closerange(3, 1 << 16)
            for number in forks.SIGNALS:
                usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
                signal.signal(number, signal.SIG_IGN if number in asked["ignored"] else usual)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, (*forks.SIGNALS, signal.SIGCHLD))
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
        for number, limits in zip(forks.LIMITS, asked["limits"], strict=True):
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

    count = threads.available_threads()
    torch.set_num_threads(count)
    pyarrow.set_cpu_count(count)
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
