"""Processes for measurements: one thread, one core, no GPU, and empty caches; and Snakemake as a user runs it."""

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.clock import FIRST_STEP
from benchmarks.jobs import Project
from benchmarks.results import ROOT

ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "RAYON_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_WAIT_POLICY": "PASSIVE",
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "PYTHONPATH": f"{ROOT / 'workflow'}{os.pathsep}{ROOT}",
}
SAID: dict[str, Any] = {"text": True, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
SNAKEFILE = ("--snakefile", str(ROOT / "Snakefile"), "--configfile", "config.yaml")


@contextmanager
def pinned(cores: int = 1) -> Iterator[None]:
    """Pin processes that are started in this context to the last cores, where the system supports it."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[-cores:])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def environment(cache: Path) -> dict[str, str]:
    """Return an environment with empty caches for data sets and compiled code."""
    caches = {"HF_DATASETS_CACHE": str(cache / "datasets"), "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor")}
    return os.environ | ONE_THREAD | caches


def snakemake(
    folder: Path, *arguments: str, python: str = sys.executable, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess:
    """Run Snakemake in a folder. Args: env: default: a user's, with a Python's own programs first and no PYTHONPATH."""
    if env is None:
        env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "OMP_NUM_THREADS")}
        env["PATH"] = f"{Path(python).parent}{os.pathsep}{env['PATH']}"
    return subprocess.run([python, "-m", "snakemake", *arguments], cwd=folder, env=env, **SAID)


def copy_code(folder: Path, commit: str = "", *paths: str) -> None:
    """Create a folder with the code of a commit, or of the working tree. Args: paths: pathspecs of git, for the latter."""

    def output(*command: str, given: bytes | None = None) -> bytes:
        return subprocess.run(command, cwd=ROOT, input=given, check=True, capture_output=True).stdout

    folder.mkdir()
    if commit:
        archive = output("git", "archive", commit)
    else:
        listed = output("git", "ls-files", "-co", "--exclude-standard", "-z", "--", *paths).split(b"\0")
        there = b"\0".join(name for name in listed if name and (ROOT / os.fsdecode(name)).is_file())
        archive = output("tar", "cf", "-", "--null", "-T", "-", given=there)
    subprocess.run(["tar", "xf", "-"], cwd=folder, input=archive, check=True)


def measured(
    function: Callable[..., dict[str, Any]], project: Project, *arguments: Any, **keywords: Any
) -> dict[str, Any]:
    """Call a function of a module in a process; return what it returns, the process's peak memory, and its log lines on
    compilation. Arguments besides the project are values of JSON."""
    with tempfile.TemporaryDirectory() as name:
        folder, result = Path(name), Path(name, "result")
        command = call_command(result, function, project, *arguments, **keywords)
        lines = checked(subprocess.run(command, cwd=folder, env=environment(folder), **SAID)).splitlines()
        found = json.loads(result.read_text(encoding="utf-8"))
    said = [line for line in lines if line.startswith("compil")]
    return found | ({"said": said} if said else {})


def call_command(
    result: Path, function: Callable[..., dict[str, Any]], project: Project, *arguments: Any, **keywords: Any
) -> list[str]:
    """Return the command that calls a function as `measured` does and writes what it returns into a file."""
    call = result.with_suffix(".call")
    of = [function.__module__, function.__name__], [str(project.folder), project.config]
    call.write_text(json.dumps([*of, arguments, keywords]), encoding="utf-8")
    return [sys.executable, "-m", "benchmarks.processes", str(call), str(result)]


def until_first_step(commands: list[list[str]], folder: Path) -> float:
    """Return the seconds from the start of the first command to the end of the last one's first training step.

    Args:
        folder: where they run, and where their caches are; they find nothing there that an earlier round left.
    """
    folder.mkdir(exist_ok=True)
    started = time.perf_counter()
    own = environment(folder / "cache")
    for command in commands[:-1]:
        checked(subprocess.run(command, cwd=folder, env=own, **SAID))
    with subprocess.Popen(commands[-1], cwd=folder, env=own, start_new_session=True, **SAID) as process:
        said = []
        for line in process.stdout:
            said.append(line)
            if line.startswith(FIRST_STEP):
                seconds = time.perf_counter() - started
                # With its child processes.
                os.killpg(process.pid, signal.SIGKILL)
                return seconds
    raise SystemExit(f"{shlex.join(commands[-1])}: no first step\n{''.join(said)[-4000:]}")


def checked(done: subprocess.CompletedProcess) -> str:
    """Return the output of a process; exit if it failed."""
    if done.returncode:
        raise SystemExit(f"{shlex.join(done.args)}: exit status {done.returncode}\n{done.stdout[-4000:]}")
    return done.stdout


if __name__ == "__main__":
    call, result = map(Path, sys.argv[1:])
    (module, name), (folder, config), arguments, keywords = json.loads(call.read_text(encoding="utf-8"))
    project = Project(folder=Path(folder), config=config)
    found = getattr(import_module(module), name)(project, *arguments, **keywords)
    # Imported late, since they take a second, which would count as a side's start.
    import torch

    from snaketune.models.machine import peak_memory

    result.write_text(json.dumps(found | {"peak_rss_bytes": peak_memory(torch.device("cpu"))}), encoding="utf-8")
