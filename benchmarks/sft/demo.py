"""`make run` in a copy of the project, from raw files to the report, and the scores of its models."""

import csv
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.data_path.rows import ROOT
from benchmarks.processes import ONE_THREAD

LEFT_OUT = ("results", "data", ".git", ".venv", ".snakemake", "__pycache__", "build", "*.egg-info", ".*_cache")
CORES = 2
MAKE = {"MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "BENCH"}


def demo() -> dict[str, Any]:
    """Time the demo once; minutes need no median."""
    with tempfile.TemporaryDirectory() as name:
        project = Path(name) / "project"
        shutil.copytree(ROOT, project, ignore=shutil.ignore_patterns(*LEFT_OUT))
        (project / ".venv").symlink_to(sys.prefix)
        # A user's environment: default threads and caches, and no outer make.
        own = {key: value for key, value in os.environ.items() if key not in {*ONE_THREAD, *MAKE}}
        # `-o`: the environment is there, whatever the times of a copy's files say.
        command = ["make", "-o", ".venv/installed", "run"]
        started = time.perf_counter()
        done = subprocess.run(
            command, cwd=project, env=own, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            preexec_fn=_two_cores,
        )  # fmt: skip
        seconds = time.perf_counter() - started
        if done.returncode:
            raise SystemExit(f"make run failed with {done.returncode}:\n{done.stdout[-4000:]}")
        exact = exact_match(project / "results/report/pages/evaluation.csv")
    return {
        "demo_s": seconds,
        "demo_exact_match_sft": exact["sft:demo"],
        "demo_exact_match_dpo": exact["dpo:demo"],
        "demo_exact_match_gained_by_dpo": exact["dpo:demo"] - exact["sft:demo"],
        "cores": min(CORES, os.cpu_count() or 1),
    }


def _two_cores() -> None:
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])


def exact_match(table: Path) -> dict[str, float]:
    """Return the share of held-out prompts that each model (`sft:demo`) answers exactly, from the report's table."""
    with table.open(encoding="utf-8", newline="") as file:
        row = next(row for row in csv.DictReader(file) if row["measure"] == "exact match")
    return {model: float(share) for model, share in row.items() if ":" in model and share}
