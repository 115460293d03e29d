"""Planning of token sequences, and the memory of each data job."""

import os
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.data_path.rows import FILES
from benchmarks.jobs import conversations
from benchmarks.results import ROOT, timed

from snaketune.packing.best_fit import lower_bound_rows, plan_best_fit_decreasing

CAPACITY = 2048


def plan(rounds: int, *_: Path, sequences: int = 10_000_000) -> dict[str, Any]:
    """Time planning alone, of lognormal lengths with a median of 120 tokens and at most CAPACITY."""
    drawn = np.random.default_rng(0).lognormal(np.log(120), 1.0, sequences)
    lengths = np.clip(drawn, 2, CAPACITY).astype(np.int32)
    planned = partial(plan_best_fit_decreasing, lengths, [CAPACITY], lengths // 2)
    seconds = statistics.median(timed(planned)() for _ in range(rounds))
    bound, rows = lower_bound_rows(lengths, CAPACITY), planned().rows
    return {
        "plan_sequences_per_s": sequences / seconds,
        "plan_efficiency_of_bound": bound / rows,
        "seconds": seconds,
        "rows": rows,
        "lower_bound_rows": bound,
        "efficiency": float(lengths.sum(dtype=np.int64)) / (rows * CAPACITY),
    }


def memory(_: int, folder: Path, data: Path, sequences: int = 10_000_000, parts: int = 4) -> dict[str, Any]:
    """Return the peak resident set of the data jobs, each in its own process, at ten million short conversations."""
    file = folder / "many.jsonl"
    with file.open("w", encoding="utf-8") as lines:
        for number in range(sequences):
            question, answer = f"What is {number} plus {number % 97}?", f"{number + number % 97}."
            lines.write(f'{{"prompt": "{question}", "response": "{answer}"}}\n')
    texts, packing = [data / name for name in FILES], {"overflow": "drop"}
    project = conversations(folder / "jobs", [file], texts, packing=packing, held_out=0.01, parts=parts)
    peaks: dict[str, float] = {}
    seconds: dict[str, float] = {}
    for job in project.missing(project.pack()):
        began = time.perf_counter()
        environment = os.environ | {"PYTHONPATH": str(ROOT / "workflow")}
        process = subprocess.Popen(project.command(job), cwd=project.folder, env=environment)
        _, status, usage = os.wait4(process.pid, 0)
        if status:
            raise SystemExit(f"{job.stage} failed with {status}")
        peaks[job.key], seconds[job.key] = usage.ru_maxrss / 1e6, time.perf_counter() - began
        print(f"  {job.key}: {peaks[job.key]:.2f} GB, {seconds[job.key]:.0f} s", file=sys.stderr, flush=True)
    largest = max(peaks.values())
    return {"peak_rss_gb_1e7": largest, "peak_rss_gb": peaks, "seconds": seconds, "bytes": file.stat().st_size}
