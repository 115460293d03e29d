"""Processes for measurements: one thread, one core, no GPU, and empty caches; and Snakemake as a user runs it."""

import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

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
def pinned() -> Iterator[None]:
    """Pin processes that are started in this context to the last core, where the system supports it."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[-1:])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def environment(cache: Path) -> dict[str, str]:
    """Return an environment with empty caches for data sets and compiled code."""
    caches = {"HF_DATASETS_CACHE": str(cache / "datasets"), "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor")}
    return os.environ | ONE_THREAD | caches


def snakemake(folder: Path, *arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess:
    """Run Snakemake in a folder. Args: env: default: a user's, with this Python's programs first and no PYTHONPATH."""
    if env is None:
        env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "OMP_NUM_THREADS")}
        env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
    return subprocess.run([sys.executable, "-m", "snakemake", *arguments], cwd=folder, env=env, **SAID)


def measured(
    function: Callable[..., dict[str, Any]], project: Project, *arguments: Any, **keywords: Any
) -> dict[str, Any]:
    """Call a function of a module in a process; return what it returns, the process's peak memory, and its log lines on
    compilation. Arguments besides the project are values of JSON."""
    with tempfile.TemporaryDirectory() as name:
        folder, call, result = Path(name), Path(name, "call"), Path(name, "result")
        of = [function.__module__, function.__name__], [str(project.folder), project.config]
        call.write_text(json.dumps([*of, arguments, keywords]), encoding="utf-8")
        command = [sys.executable, "-m", "benchmarks.processes", str(call), str(result)]
        lines = checked(subprocess.run(command, cwd=folder, env=environment(folder), **SAID)).splitlines()
        found = json.loads(result.read_text(encoding="utf-8"))
    said = [line for line in lines if line.startswith("compil")]
    return found | ({"said": said} if said else {})


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
    import torch

    from snaketune.engine.model.machine import peak_memory

    result.write_text(json.dumps(found | {"peak_rss_bytes": peak_memory(torch.device("cpu"))}), encoding="utf-8")
