"""The packed engine on a CUDA GPU: first whether every kernel is right, then how fast it trains, beside its peers.

    make bench-gpu                       all of it that fits into nine minutes, the most important first
    make bench-gpu BENCH='--call 1'      kernels, and trainings of 23M and 1.5B parameters
    make bench-gpu BENCH='--call 2'      7B with adapters: SFT and DPO
    make bench-gpu BENCH='--call 3'      the demo killed, resumed, evaluated and calibrated; 4-bit weights; the rest

Or, where there is no environment of this project, `python3 -m benchmarks.gpu` with torch 2.11 or newer, transformers 5 and the
wheels that `make gpu-wheels` gathers (docs/benchmarks.md). No network, no Snakemake, no data; weights are random. Writes
results/bench/gpu.json, or --out, and beside it the same as a Markdown table, after every result; ends within `--seconds`, and
says what it had to skip. `--rehearse` runs all of it with tiny models on the CPU, into files of its own.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.gpu.table import table
from benchmarks.gpu.worker import KERNELS, MARK
from benchmarks.results import ROOT, when, write_json

# By figure: its goal; what of an entry it is; the part that the entry is of, and the peer's part that it is divided by, if any;
# and what else the entries have. The peer of DPO is TRL where that is installed; its entry says so, or what stood in for it.
FIGURES: dict[str, tuple[float | None, str, list[str], dict[str, str]]] = {
    "gpu_23m_mfu": (0.35, "mfu", ["measure 23m"], {}),
    "gpu_1_5b_full_mfu": (0.5, "mfu", ["measure 1_5b_full"], {}),
    "gpu_7b_lora_mfu": (0.5, "mfu", ["measure 7b_lora"], {}),
    "gpu_7b_qlora_mfu": (None, "mfu", ["measure 7b_qlora"], {}),
    "gpu_23m_speedup_vs_trl": (3, "tokens_per_s", ["measure 23m", "peer 23m"], {}),
    "gpu_7b_lora_speedup_vs_trl": (1.3, "tokens_per_s", ["measure 7b_lora", "peer 7b_lora"], {}),
    **{
        f"gpu_dpo_{shape}_{ratio.replace(':', 'to')}_speedup": (
            2, "pairs_per_s", [f"dpo {shape}", f"dpopeer {shape}"], {"prompt_to_completion": ratio}
        )
        for shape in ("1_5b", "7b") for ratio in ("1:1", "3:1")
    },
}  # fmt: skip
GOALS = {key: goal for key, (goal, *_) in FIGURES.items()}
# The parts of each call, most important first, and the seconds that must be left for a part to begin.
CALLS = {
    1: {
        "kernels": 0,
        "measure 23m": 40,
        "measure 1_5b_full": 60,
        "deterministic 23m": 40,
        "peer 23m": 40,
        "deterministic 1_5b_full": 60,
    },
    2: {"measure 7b_lora": 60, "dpo 7b": 80, "dpopeer 7b": 80, "peer 7b_lora": 60, "deterministic 7b_lora": 60},
    3: {"demo": 200, "measure 7b_qlora": 60, "dpo 1_5b": 50, "dpopeer 1_5b": 50},
}
PARTS = {part: seconds for call in CALLS.values() for part, seconds in call.items()}
# Limit of a part relative to its expected time, so that all parts run; and the share of the time for all kernels.
AT_MOST, FOR_KERNELS = 3, 0.3
# The keys of an entry that are printed while it runs.
PRINTED = (
    "device", "case", "precision", "prompt_to_completion", "peer", "status", "why", "mfu", "pairs_per_s",
    "tokens_per_s", "step_s", "rows", "peak_memory_gb", "forward", "backward", "what", "deterministic", "same_digest",
)  # fmt: skip
# How much of the output of a failed part is stored.
LAST_LINES = 30
Found = dict[str, list[dict[str, Any]]]


class Results:
    """The results so far, in a file that is replaced atomically."""

    def __init__(self, path: Path, about: dict[str, Any]):
        self.path, self.about = path, about
        self.found: Found = {}
        self.lock = threading.Lock()

    def add(self, part: str, entry: dict[str, Any]) -> None:
        with self.lock:
            self.found.setdefault(part, []).append(entry)
            shown = "  ".join(f"{name} {_short(entry[name])}" for name in PRINTED if entry.get(name) is not None)
            print(f"{part}: {shown}", flush=True)
            # A rehearsal writes no figures.
            keys = {} if self.about["rehearsal"] else figures(self.found)
            write_json(self.path, keys | {"goals": GOALS, "made_on": self.about, "results": self.found})
            self.path.with_suffix(".md").write_text(table(self.found, self.about), encoding="utf-8")

    def wrong(self) -> list[str]:
        return [part for part, some in self.found.items() if any(one["status"] in ("failed", "wrong") for one in some)]


def figures(found: Found) -> dict[str, float]:
    """Return the figures by key: the share of the peak with default settings, and the speedup over a peer."""
    made = {}
    for key, (_, what, parts, of) in FIGURES.items():
        values = [measured(found, part, **of).get(what) for part in parts]
        if all(values):
            ours, *peer = values
            made[key] = ours / peer[0] if peer else ours
    return made


def measured(found: Found, part: str, **of: str) -> dict[str, Any]:
    """Return the first entry of a part that holds a measurement and matches `of`; empty if there is none."""
    entries = (entry for entry in found.get(part, []) if entry["status"] == "measured")
    return next((entry for entry in entries if of.items() <= entry.items()), {})


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)[:300]


def run_part(part: str, results: Results, deadline: float, *options: str) -> None:
    """Run a part in a process of its own, until it ends or the time is up."""
    kind, _, name = part.partition(" ")
    paths = (str(ROOT / "workflow"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")]))
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        # One of several: a trainer that sees more spreads a batch over them.
        "CUDA_VISIBLE_DEVICES": ""
        if "--rehearse" in options
        else os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0],
        "HF_HUB_OFFLINE": "1",
    }
    with subprocess.Popen(
        [sys.executable, "-m", "benchmarks.gpu.worker", kind, name, *options], env=environment, text=True,
        errors="replace", stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    ) as process:  # fmt: skip
        # Its processes too.
        late = threading.Timer(max(deadline - time.monotonic(), 0), os.killpg, [process.pid, signal.SIGKILL])
        late.start()
        said, ended = [], False
        for line in process.stdout:
            if line.startswith(MARK):
                entry = json.loads(line.removeprefix(MARK))
                ended |= entry["status"] == "failed"
                results.add(part, entry)
            else:
                said = [*said, line][-LAST_LINES:]
        status = process.wait()
        late.cancel()
    if time.monotonic() >= deadline:
        results.add(part, {"status": "skipped", "why": "stopped here: the time was up"})
    elif status and not ended:
        results.add(part, {"status": "failed", "why": f"exit status {status}", "said": "".join(said)})


def main() -> int:
    """Returns the exit status: 1 if anything failed or wasn't right."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=540, help="when to end")
    parser.add_argument("--rehearse", action="store_true", help="tiny models on the CPU")
    parser.add_argument("--call", type=int, choices=CALLS, help="the parts of one of three calls")
    parser.add_argument("--only", nargs="*", choices=PARTS, metavar="PART")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    deadline = time.monotonic() + options.seconds
    out = options.out or ROOT / f"results/bench/gpu{'-rehearsal' if options.rehearse else ''}.json"
    results = Results(out, when("benchmarks.gpu") | {"rehearsal": options.rehearse})
    switches = ["--rehearse"] if options.rehearse else []
    run_part("facts here", results, deadline, *switches)
    if results.wrong():
        return 1
    wanted = options.only or CALLS.get(options.call, PARTS)
    if "kernels" in wanted:
        # On a GPU compilation takes the time, on cores that have nothing else to do.
        until = time.monotonic() + options.seconds * FOR_KERNELS
        with ThreadPoolExecutor(1 if options.rehearse else len(KERNELS)) as pool:
            for name in KERNELS:
                pool.submit(run_part, f"kernel {name}", results, until, *switches)
    for part in wanted:
        if part == "kernels":
            continue
        left = deadline - time.monotonic()
        if left < (5 if options.rehearse else PARTS[part]):
            results.add(part, {"status": "skipped", "why": f"{left:.0f} s left; it needs about {PARTS[part]}"})
            continue
        rows = measured(results.found, part.replace("peer", "measure")).get("rows") if part.startswith("peer") else None
        until = min(deadline, time.monotonic() + AT_MOST * PARTS[part])
        run_part(part, results, until, *switches, *(["--rows", str(rows)] if rows else []))
    if wrong := results.wrong():
        print(f"failed or not right: {', '.join(wrong)}; see {out}", file=sys.stderr)
    print(f"written: {out}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
