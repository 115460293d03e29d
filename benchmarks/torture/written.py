"""Output files: results/bench/torture.json with every trial, and the table in docs/reliability.md; clusters apart."""

import json
import platform
import shlex
import sys
import time
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.results import keep_table
from benchmarks.torture.faults import FAULTS
from benchmarks.torture.slurm_faults import FAULTS as SLURM_FAULTS
from benchmarks.torture.trials import Reference

ROOT = Path(__file__).parents[2]
RESULTS, ON_SLURM = ROOT / "results/bench/torture.json", ROOT / "results/bench/torture-slurm.json"
PAGE = ROOT / "docs/reliability.md"
LIBRARIES = ("snakemake", "torch", "transformers", "accelerate", "pyarrow", "safetensors")

HEAD = """{passed} of {made} trials passed{older}. {date}; {versions}; `{command}`. Without
faults, the workflow takes {seconds:.0f} s; all trials together took {hours:.1f} hours.

| fault | where | faults injected | passed | of | outcome | seconds each |
|---|---|---|---|---|---|---|
"""


def read(path: Path, *, seed: int) -> dict[str, Any]:
    """Read the trials of this seed by their keys."""
    if not path.is_file():
        return {}
    there = json.loads(path.read_text(encoding="utf-8"))
    trials = there["trials"] if there["seed"] == seed else {}
    # Keys of earlier versions of this benchmark.
    former = {"place": "point", "told": "instructions"}
    return {key: {former.get(name, name): value for name, value in entry.items()} for key, entry in trials.items()}


def write(path: Path, trials: dict[str, Any], reference: Reference, *, seed: int) -> None:
    """Write all trials so far, with their totals."""
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {
        "date": time.strftime("%Y-%m-%d"),
        "command": shlex.join(["python", "-m", "benchmarks.torture", *sys.argv[1:]]),
        "seed": seed,
        "versions": {"python": platform.python_version(), **{name: version(name) for name in LIBRARIES}},
        "undisturbed_seconds": round(reference.seconds, 1),
        "faults": faults(trials),
        "trials": dict(sorted(trials.items())),
    }
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


def write_page(trials: dict[str, Any], reference: Reference, path: Path) -> None:
    """Write the table of docs/reliability.md that belongs to a file of trials."""
    if path in (RESULTS, ON_SLURM):
        keep_table(PAGE, path.stem, as_markdown(trials, reference).rstrip())


def as_markdown(trials: dict[str, Any], reference: Reference) -> str:
    """Return a table with a row for each fault and point."""
    versions = ", ".join(f"{name} {version(name)}" for name in LIBRARIES)
    points = [(fault, point, at) for fault, by_point in faults(trials).items() for point, at in by_point.items()]
    made, passed = (sum(at[key] for *_, at in points) for key in ("trials", "passed"))
    hours = sum(at["seconds"] for *_, at in points) / 3600
    command = shlex.join(["python", "-m", "benchmarks.torture", *sys.argv[1:]])
    older = sum(entry.get("code") != reference.code for entry in trials.values())
    head = HEAD.format(
        date=time.strftime("%Y-%m-%d"),
        command=command,
        versions=versions,
        made=made,
        passed=passed,
        older=f" ({older} of them with earlier code)" if older else "",
        seconds=reference.seconds,
        hours=hours,
    )
    lines, known = [], FAULTS | SLURM_FAULTS
    for fault, point, at in points:
        ended = "; ".join(f"{count} {how}" for how, count in sorted(at["ended"].items()))
        cells = (
            known[fault].what if fault in known else fault,
            point,
            at["strikes"],
            at["passed"],
            at["trials"],
            ended,
        )
        lines.append("| " + " | ".join(str(cell).replace("|", "/") for cell in cells) + f" | {at['mean']:.0f} |")
    return head + "\n".join(lines) + "\n"


def faults(trials: dict[str, Any]) -> dict[str, Any]:
    """Count trials and outcomes by fault and point."""
    found: dict[str, Any] = {}
    for entry in trials.values():
        at = found.setdefault(entry["fault"], {}).setdefault(entry["point"], {"trials": 0, "passed": 0, "ended": {}})
        at["trials"] += 1
        at["passed"] += entry["passed"]
        at["ended"] = dict(Counter(at["ended"]) + Counter([entry["ended"].split(":")[0]]))
        at["strikes"] = at.get("strikes", 0) + entry["strikes"]
        at["seconds"] = round(at.get("seconds", 0) + entry["seconds"], 1)
        at["mean"] = round(at["seconds"] / at["trials"], 1)
    return found
