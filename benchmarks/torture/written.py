"""results/bench/torture.json, every trial as it ended; and the table of them in docs/reliability.md. Of a cluster, apart."""

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


def write_page(trials: dict[str, Any], reference: Reference, path: Path) -> None:
    """The table of docs/reliability.md that belongs to a file of trials; none does to another file."""
    if path in (RESULTS, ON_SLURM):
        keep_table(PAGE, path.stem, as_markdown(trials, reference).rstrip())


def as_markdown(trials: dict[str, Any], reference: Reference) -> str:
    """A row for each fault and place, and how it ended."""
    versions = ", ".join(f"{name} {version(name)}" for name in LIBRARIES)
    places = [(fault, place, at) for fault, by_place in faults(trials).items() for place, at in by_place.items()]
    made, passed = (sum(at[key] for *_, at in places) for key in ("trials", "passed"))
    hours = sum(at["seconds"] for *_, at in places) / 3600
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
    for fault, place, at in places:
        ended = "; ".join(f"{count} {how}" for how, count in sorted(at["ended"].items()))
        cells = (
            known[fault].what if fault in known else fault,
            place,
            at["strikes"],
            at["passed"],
            at["trials"],
            ended,
        )
        lines.append("| " + " | ".join(str(cell).replace("|", "/") for cell in cells) + f" | {at['mean']:.0f} |")
    return head + "\n".join(lines) + "\n"


def faults(trials: dict[str, Any]) -> dict[str, Any]:
    """By fault and place: how many trials there were, and how they ended."""
    found: dict[str, Any] = {}
    for entry in trials.values():
        at = found.setdefault(entry["fault"], {}).setdefault(entry["place"], {"trials": 0, "passed": 0, "ended": {}})
        at["trials"] += 1
        at["passed"] += entry["passed"]
        at["ended"] = dict(Counter(at["ended"]) + Counter([entry["ended"].split(":")[0]]))
        at["strikes"] = at.get("strikes", 0) + entry["strikes"]
        at["seconds"] = round(at.get("seconds", 0) + entry["seconds"], 1)
        at["mean"] = round(at["seconds"] / at["trials"], 1)
    return found
