"""Snakemake's command line, within this process: a dry run takes a tenth of the time that Snakemake takes to be imported."""

import atexit
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import IO
from unittest import mock


def environment() -> dict[str, str]:
    """The variables for a run of the workflow, whose jobs start `python`."""
    programs, path = str(Path(sys.executable).parent), os.environ["PATH"]
    return os.environ | {"PATH": path if programs in path.split(os.pathsep) else f"{programs}:{path}"}


def snakemake(arguments: list[str], folder: Path, umask: int = -1, *, apart: bool = False) -> tuple[int, str]:
    """Run `snakemake` with these arguments in `folder`; return its exit status and all that it and its jobs printed.

    Args:
        umask: -1: as it is here.
        apart: in a process of its own, which imports the package of another Snakefile than this repository's.
    """
    if apart:
        command, pipe = [sys.executable, "-m", "snakemake", *arguments], subprocess.PIPE
        done = subprocess.run(
            command, cwd=folder, env=environment(), umask=umask, stdout=pipe, stderr=subprocess.STDOUT, text=True
        )
        return done.returncode, done.stdout
    from snakemake.cli import main
    from snakemake.shell import shell

    from snaketune.stages import job_files

    # What Snakemake changes in its process. Its Snakefile is read anew each time.
    at_exit: list[Callable] = []
    register = atexit.register

    def registered(function: Callable, *arguments: object) -> Callable:
        # Functions of a Snakefile have no module.
        if (function.__module__ or "snaketune.").startswith("snaketune."):
            at_exit.append(function)
            return function
        return register(function, *arguments)

    with tempfile.TemporaryFile() as output, ExitStack() as restored:
        restored.callback(os.chdir, Path.cwd())
        restored.callback(signal.signal, signal.SIGTERM, signal.getsignal(signal.SIGTERM))
        if umask >= 0:
            restored.callback(os.umask, os.umask(umask))
        restored.enter_context(mock.patch.dict(os.environ, environment()))
        restored.enter_context(mock.patch.object(sys, "path", [*sys.path]))
        restored.enter_context(mock.patch.object(sys, "argv", ["snakemake", *arguments]))
        restored.enter_context(mock.patch.object(atexit, "register", registered))
        # Jobs print to what pytest had for standard output when this was imported.
        restored.enter_context(mock.patch.object(sys.modules[shell.__module__], "STDOUT", None))
        # Locks that last as long as the process.
        restored.enter_context(mock.patch.object(job_files, "_held", []))
        restored.enter_context(printing_to(output))
        os.chdir(folder)
        try:
            main(arguments)
            status = 0
        except SystemExit as end:
            status = end.code or 0
        for function in at_exit:
            function()
        sys.stderr.flush()
        output.seek(0)
        return status, output.read().decode()


@contextmanager
def printing_to(file: IO[bytes]) -> Iterator[None]:
    """Redirect standard output and error to a file, those of child processes too."""
    sys.stdout.flush()
    sys.stderr.flush()
    streams = os.dup(1), os.dup(2)
    for number in (1, 2):
        os.dup2(file.fileno(), number)
    try:
        with (
            os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8") as text,
            redirect_stdout(text),
            redirect_stderr(text),
        ):
            yield
    finally:
        for number, stream in enumerate(streams, 1):
            os.dup2(stream, number)
            os.close(stream)
