"""Training steps of each side, the time until the first one, and the demo."""

import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

from benchmarks.data_path.rows import numbered
from benchmarks.flops import attention_flops, step_flops
from benchmarks.jobs import Project
from benchmarks.processes import ONE_THREAD, SAID, call_command, checked, copy_code, measured, pinned, until_first_step
from benchmarks.results import in_turn, medians, timed
from benchmarks.sft.material import MODEL, base_of, made, raw_of
from benchmarks.sft.sides import SIDES, trl_packed

MAKE = {"MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "BENCH"}
CORES = 2


def speed(rounds: int, project: Project, warm_up: int = 5, steps: int = 30) -> dict[str, Any]:
    """Measure real tokens/s, the share of the core's matmul peak, and memory, in rounds of all sides."""
    from safetensors import safe_open

    project.make(project.pack())
    with pinned():
        found = in_turn(
            rounds,
            {name: partial(measured, side, project, warm_up, steps) for name, side in SIDES.items()},
            lambda one: f"{one['tokens_per_s']:.0f} tokens/s" if "tokens_per_s" in one else str(one["gflops_per_s"]),
        )
    trainings = {side: some for side, some in found.items() if side != "gemm"}
    rates, memory = medians(trainings, "tokens_per_s"), medians(trainings, "peak_rss_bytes")
    with safe_open(base_of(project) / "model.safetensors", framework="np") as file:
        # Tied ones once.
        parameters = sum(prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    heads = MODEL["num_attention_heads"]
    shape = {"heads": heads, "head_dim": MODEL["hidden_size"] // heads, "layers": MODEL["num_hidden_layers"]}
    flops = statistics.median(
        step_flops(parameters, one["tokens"], attention_flops(one["visible_pairs"], **shape)) / one["seconds"]
        for one in found["snaketune"]
    )
    peak = max(rate for one in found["gemm"] for rate in one["gflops_per_s"].values()) * 1e9
    return {
        "cpu_speedup_vs_trl_packed": rates["snaketune"] / rates["trl packed"],
        "cpu_speedup_vs_trl_unpacked": rates["snaketune"] / rates["trl unpacked"],
        "cpu_share_of_gemm_peak": flops / peak,
        "cpu_peak_rss_ratio_vs_trl": memory["snaketune"] / memory["trl packed"],
        "tokens_per_s": rates,
        "peak_rss_gb": {side: bytes_ / 1e9 for side, bytes_ in memory.items()},
        "gflops_per_s": flops / 1e9,
        "gemm_peak_gflops_per_s": peak / 1e9,
        "flops": "6 per parameter and real token, and attention over visible pairs",
        "parameters": parameters,
        "rounds": found,
    }


def startup(rounds: int, folder: Path, project: Project, conversations: int = 100_000) -> dict[str, Any]:
    """Time both sides from process start to the end of the first step, each with its own data preparation.

    Ours twice: with the data stages as the rules run them (a first start), and with finished shards (later starts). TRL
    prepares its rows from JSON lines with an empty cache.
    """
    folder.mkdir()
    raw = raw_of(project)
    rows = sum(1 for _ in raw.open(encoding="utf-8"))
    many = numbered(raw, folder / "many.jsonl", *divmod(conversations, rows))
    first = made(folder / "first", many, raw, precision=project.precision)
    later = first.copy_to(folder / "later")
    later.make(later.pack())

    def ours(project: Project, work: Path) -> list[list[str]]:
        own = project.copy_to(work)
        return [own.command(job) for job in own.missing(own.job("sft", "start"))]

    def trl(work: Path) -> list[list[str]]:
        return [call_command(work / "result", trl_packed, first, 0, 1)]

    def seconds_of(commands: Callable[[Path], list[list[str]]]) -> float:
        with tempfile.TemporaryDirectory(dir=folder, ignore_cleanup_errors=True) as name:
            return until_first_step(commands(Path(name)), Path(name))

    sides = {"snaketune": partial(ours, first), "snaketune, shards there": partial(ours, later), "trl": trl}
    with pinned():
        seconds = in_turn(rounds, {name: partial(seconds_of, side) for name, side in sides.items()}, "{:.1f} s".format)
    median = medians(seconds)
    return {
        "startup_s_ratio_vs_trl": median["snaketune"] / median["trl"],
        "startup_s_ratio_vs_trl_shards_there": median["snaketune, shards there"] / median["trl"],
        "conversations": conversations,
        "seconds": median,
        "rounds": seconds,
    }


def demo() -> dict[str, Any]:
    """Time `make run` in a copy of the project, from raw files to the report, once; minutes need no median."""
    with tempfile.TemporaryDirectory() as name:
        project = Path(name) / "project"
        copy_code(project, "", ":!data")
        (project / ".venv").symlink_to(sys.prefix)
        # A user's environment: default threads and caches, and no outer make.
        own = {key: value for key, value in os.environ.items() if key not in {*ONE_THREAD, *MAKE}}
        # `-o`: the environment is there, whatever the times of a copy's files say.
        command = ["make", "-o", ".venv/installed", "run"]
        with pinned(CORES):
            seconds = timed(lambda: checked(subprocess.run(command, cwd=project, env=own, **SAID)))()
        exact = exact_match(project / "results/report/pages/evaluation.csv")
        runs = [json.loads((project / f"results/{stage}/demo/run.json").read_text()) for stage in ("sft", "dpo")]
    return {
        "demo_s": seconds,
        "demo_exact_match_sft": exact["sft:demo"],
        "demo_exact_match_dpo": exact["dpo:demo"],
        "demo_exact_match_gained_by_dpo": exact["dpo:demo"] - exact["sft:demo"],
        "demo_share_of_time_measuring_held_out": max(run["held_out"]["share_of_time"] for run in runs),
        "demo_held_out_measurements": [len(run["held_out"]["points"]) for run in runs],
        "cores": min(CORES, os.cpu_count() or 1),
    }


def exact_match(table: Path) -> dict[str, float]:
    """Return the share of held-out prompts that each model (`sft:demo`) answers exactly, from the report's table."""
    with table.open(encoding="utf-8", newline="") as file:
        row = next(row for row in csv.DictReader(file) if row["measure"] == "exact match")
    return {model: float(share) for model, share in row.items() if ":" in model and share}
