"""results/bench/torture.json, every trial as it ended; and docs/reliability.md, the table of them."""

import json
import platform
import shlex
import sys
import time
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.torture.trials import Reference

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results/bench/torture.json"
LIBRARIES = ("snakemake", "torch", "transformers", "accelerate", "pyarrow", "safetensors")


def read(path: Path, *, seed: int) -> dict[str, Any]:
    """Trials that were made with this seed, by their keys."""
    if not path.is_file():
        return {}
    there = json.loads(path.read_text(encoding="utf-8"))
    return there["trials"] if there["seed"] == seed else {}


def write(path: Path, trials: dict[str, Any], reference: Reference, *, seed: int) -> None:
    """All that is known by now, and how it adds up."""
    path.parent.mkdir(parents=True, exist_ok=True)
    told = {
        "date": time.strftime("%Y-%m-%d"),
        "command": shlex.join(["python", "-m", "benchmarks.torture", *sys.argv[1:]]),
        "seed": seed,
        "versions": {"python": platform.python_version(), **{name: version(name) for name in LIBRARIES}},
        "undisturbed_seconds": round(reference.seconds, 1),
        "faults": faults(trials),
        "trials": dict(sorted(trials.items())),
    }
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


def faults(trials: dict[str, Any]) -> dict[str, Any]:
    """By fault and place: how many trials there were, and how they ended."""
    found: dict[str, Any] = {}
    for entry in trials.values():
        at = found.setdefault(entry["fault"], {}).setdefault(entry["place"], {"trials": 0, "passed": 0, "ended": {}})
        at["trials"] += 1
        at["passed"] += entry["passed"]
        at["ended"] = dict(Counter(at["ended"]) + Counter([entry["ended"].split(":")[0]]))
        at["seconds"] = round(at.get("seconds", 0) + entry["seconds"], 1)
    return found
