"""A process that has imported the libraries, never snaketune, and forks for each `python -m MODULE` of a test.

`python -P server.py SOCKET OWNER` serves until the process with the id OWNER has ended. A client (client.py) sends a JSON line
with its arguments, folder, environment and limits, and its standard streams. The answer is `refused` if a new Python process is
needed; otherwise each further byte is a signal for the fork, and the answer is its exit status. A fork is killed with its
client.
"""

import atexit
import gc
import importlib
import json
import os
import re
import resource
import runpy
import selectors
import signal
import socket
import sys
import threading
import traceback
from contextlib import suppress
from pathlib import Path
from types import ModuleType

# What the stages import.
LIBRARIES = [
    "torch",
    "torch.utils.data",
    "torch.utils.checkpoint",
    "torch.nn.attention.varlen",
    "torch.distributed.run",
    "torch._dynamo",
    "transformers",
    "transformers.trainer",
    "transformers.trainer_callback",
    "transformers.modeling_utils",
    "transformers.utils.chat_template_utils",
    "transformers.models.llama.modeling_llama",
    "transformers.models.auto.modeling_auto",
    "peft",
    "accelerate",
    "safetensors.torch",
    "bitsandbytes",
    "tokenizers",
    "sentencepiece",
    "numpy",
    "pyarrow",
    "pyarrow.compute",
    "pyarrow.parquet",
    "orjson",
    "regex",
    "ftfy",
    "py3langid",
    "rensa",
    "xxhash",
    "pydantic",
    "yaml",
    "psutil",
    "jinja2",
    "matplotlib.pyplot",
    "huggingface_hub",
    "tensorboard.compat.proto.event_pb2",
    "snakemake.cli",
    "snakemake.report",
    "smart_open",
]
# Libraries read these when they are imported, so a fork can't change them.
READ_AT_IMPORT = re.compile(
    r"PYTHON(?!PATH$|DONTWRITEBYTECODE$)|HF_(?!XET|TOKEN$)|HUGGINGFACE|TRANSFORMERS_|TORCH_HOME|TORCH_LOGS|TORCH_COMPILE|TORCHDYNAMO|CUDA|HOME$|MPL|OMP_WAIT|LD_"
)
# As it was before imports changed it.
ENVIRONMENT = dict(os.environ)
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def serve(path: str, owner: int) -> None:
    # Clients that connect during the imports wait.
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)
    # Imports create what stays.
    gc.disable()
    for library in LIBRARIES:
        importlib.import_module(library)
    # What they load or build when it is needed first.
    importlib.import_module("snakemake.cli").get_argument_parser()
    importlib.import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("llama")
    gc.collect()
    gc.freeze()
    gc.enable()
    ends_with(owner)
    given = [str(Path(folder).absolute()) for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    paths = [folder for folder in sys.path if folder and folder not in given]
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj is listener:
                connection = listener.accept()[0]
                if pid := start(connection, paths):
                    fork = Fork(selector, connection, pid)
                    selector.register(connection, selectors.EVENT_READ, fork.forward_signals)
                    selector.register(fork.process, selectors.EVENT_READ, fork.report_end)
                else:
                    connection.close()
            else:
                key.data()


class Fork:
    def __init__(self, selector: selectors.BaseSelector, connection: socket.socket, pid: int):
        self.selector, self.connection, self.pid = selector, connection, pid
        self.process, self.has_ended, self.has_client = os.pidfd_open(pid), False, True

    def forward_signals(self) -> None:
        # Both events may be in one answer of the selector.
        if self.has_ended:
            return
        try:
            signals = self.connection.recv(16)
        except ConnectionError:
            signals = b""
        if not signals:
            self.selector.unregister(self.connection)
            self.has_client = False
        for number in signals or (signal.SIGKILL,):
            signal.pidfd_send_signal(self.process, number)

    def report_end(self) -> None:
        self.has_ended = True
        status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self.selector.unregister(self.process)
        os.close(self.process)
        if self.has_client:
            self.selector.unregister(self.connection)
            # The client may have been killed.
            with suppress(OSError):
                self.connection.sendall(f"{status}\n".encode())
        self.connection.close()


def start(connection: socket.socket, paths: list[str]) -> int | None:
    """Read a request and fork; return the fork's process id, or None if the request is refused or the client is gone."""
    text, streams, *_ = socket.recv_fds(connection, 1 << 20, 3)
    while text and not text.endswith(b"\n"):
        text += connection.recv(1 << 20)
    if not text:
        return None
    request = json.loads(text)
    variables = request["environment"]
    paths = [request["folder"], *filter(None, variables.get("PYTHONPATH", "").split(os.pathsep)), *paths]
    if fixed(variables) != fixed(ENVIRONMENT):
        connection.sendall(b"refused\n")
        for stream in streams:
            os.close(stream)
        return None
    # A signal waits until the fork has the client's way to handle it.
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    pid = os.fork()
    if pid:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
        for stream in streams:
            os.close(stream)
        return pid
    status = 1
    try:
        status = run(request, streams, paths)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def fixed(environment) -> dict[str, str]:
    return {name: value for name, value in environment.items() if READ_AT_IMPORT.match(name)}


def run(request: dict, streams: list[int], paths: list[str]) -> int:
    """Run the request in this fork, as `python -m` does; return the exit status."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    # Connections to other clients.
    os.closerange(3, 1 << 16)
    for number in FORWARDED:
        usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN if number in request["ignored"] else usual)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    os.chdir(request["folder"])
    os.umask(request["umask"])
    resource.setrlimit(resource.RLIMIT_FSIZE, request["file_size"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.stdin, sys.stdout, sys.stderr = (
        open(number, mode, closefd=False)  # noqa: SIM115
        for number, mode in enumerate(("r", "w", "w"))
    )
    sys.stderr.reconfigure(line_buffering=True)
    sys.executable = request["executable"]
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    _, module, *arguments = request["arguments"]
    sys.argv = ["-m", *arguments]
    sys.path[:] = paths
    importlib.invalidate_caches()
    # It runs as __main__, and would be there a second time only when something imports it.
    if not hasattr(sys.modules.get(module), "__path__"):
        sys.modules.pop(module, None)
    sys.modules["__main__"] = ModuleType("__main__")
    set_threads()
    status = exit_status(module)
    # What Python does at its end.
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    return status


def set_threads() -> None:
    """Set what libraries read from the environment when they are imported."""
    import numpy
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0))))
    numpy.random.seed()


def exit_status(module: str) -> int:
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


def ends_with(owner: int) -> None:
    """End this process with its owner."""

    def check(*_) -> None:
        try:
            os.kill(owner, 0)
        except ProcessLookupError:
            os._exit(0)

    signal.signal(signal.SIGALRM, check)
    signal.setitimer(signal.ITIMER_REAL, 1, 1)


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
