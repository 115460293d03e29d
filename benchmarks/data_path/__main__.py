"""The data path beside its peers, on one thread, both sides in turn, medians.

    make bench-data

Peers: TRL's own preparation of an SFT dataset (`SFTTrainer._prepare_dataset`: chat template, tokens, labels, packing) and
sentencepiece's own batch encoder. The rows are gsm8k and dolly, below `data/` as `config/recipes/gsm8k-local.yaml` has them,
each repetition with another number in front, or lognormal lengths. Writes results/bench/data.json. Everything takes over half
an hour; `--only` runs some of it.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.data_path.parts import parts
from benchmarks.data_path.rows import FILES
from benchmarks.data_path.texts import prepare, tokenize
from benchmarks.jobs import conversations
from benchmarks.results import ROOT, Goals, options_of, require, run_parts, table, timed

from snaketune.engine.packing.best_fit import lower_bound_rows, plan_best_fit_decreasing

# Tokens of a row in `plan`.
CAPACITY = 2048
GOALS: Goals = {
    "plan_sequences_per_s": ("at least", 10e6),
    "plan_efficiency_of_bound": ("at least", 0.999),
    "prepare_speedup_vs_trl": ("at least", 8),
    "tokenize_speedup_vs_sentencepiece": ("at least", 5),
    "peak_rss_gb_1e7": ("at most", 2),
    "parts_speedup_of_two": ("at least", 1.8),
    "parts_speedup_vs_datasets": ("at least", 2),
}


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


MEASURES: dict[str, Callable[[int, Path, Path], dict[str, Any]]] = {
    "plan": plan, "tokenize": tokenize, "prepare": prepare, "parts": parts, "memory": memory,
}  # fmt: skip


def main() -> None:
    options = options_of(__doc__, "results/bench/data.json", "gsm8k and dolly_hhrlhf_small", MEASURES).parse_args()
    require(options.data, FILES)

    def measured(part: str) -> dict[str, Any]:
        with tempfile.TemporaryDirectory(dir=".") as folder:
            return MEASURES[part](options.rounds, Path(folder).resolve(), options.data.resolve())

    measures = {part: partial(measured, part) for part in MEASURES}
    print(table(run_parts("benchmarks.data_path", options, measures, GOALS), GOALS))


if __name__ == "__main__":
    main()
