"""Output files: results/bench/torture.json with every trial, and the table in docs/reliability.md; clusters apart."""

import json
import platform
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.results import ROOT, keep_table, markdown, when, write_json
from benchmarks.torture.faults import FAULTS
from benchmarks.torture.slurm_faults import FAULTS as SLURM_FAULTS
from benchmarks.torture.trials import Reference

RESULTS, ON_SLURM = ROOT / "results/bench/torture.json", ROOT / "results/bench/torture-slurm.json"
PAGE = ROOT / "docs/reliability.md"
LIBRARIES = ("snakemake", "torch", "transformers", "accelerate", "pyarrow", "safetensors")
HEAD = """{passed} of {made} trials passed{older}. {date}; {versions}; `{command}`. Without
faults, the workflow takes {seconds:.0f} s; all trials together took {hours:.1f} hours.

"""
COLUMNS = ("fault", "where", "faults injected", "passed", "of", "outcome", "seconds each")


def read(path: Path, *, seed: int) -> dict[str, Any]:
    """Read the trials of this seed by their keys."""
    if not path.is_file():
        return {}
    there = json.loads(path.read_text(encoding="utf-8"))
    return there["trials"] if there["seed"] == seed else {}


def write(path: Path, trials: dict[str, Any], reference: Reference, *, seed: int) -> None:
    """Write all trials so far, with their totals, and the table of docs/reliability.md that belongs to the file."""
    document = {
        **when("benchmarks.torture"),
        "seed": seed,
        "versions": {"python": platform.python_version(), **{name: version(name) for name in LIBRARIES}},
        "undisturbed_seconds": round(reference.seconds, 1),
        "faults": faults(trials),
        "trials": dict(sorted(trials.items())),
    }
    write_json(path, document, indent=1)
    if path in (RESULTS, ON_SLURM):
        keep_table(PAGE, path.stem, as_markdown(trials, reference).rstrip())


def as_markdown(trials: dict[str, Any], reference: Reference) -> str:
    """Return a table with a row for each fault and point."""
    points = [(fault, point, at) for fault, by_point in faults(trials).items() for point, at in by_point.items()]
    older = sum(entry.get("code") != reference.code for entry in trials.values())
    head = HEAD.format(
        **when("benchmarks.torture"),
        versions=", ".join(f"{name} {version(name)}" for name in LIBRARIES),
        made=sum(at["trials"] for *_, at in points),
        passed=sum(at["passed"] for *_, at in points),
        older=f" ({older} of them with earlier code)" if older else "",
        seconds=reference.seconds,
        hours=sum(at["seconds"] for *_, at in points) / 3600,
    )
    rows, known = [], FAULTS | SLURM_FAULTS
    for fault, point, at in points:
        ended = "; ".join(f"{count} {how}" for how, count in sorted(at["ended"].items()))
        what = known[fault].what if fault in known else fault
        cells = (what, point, at["strikes"], at["passed"], at["trials"], ended, f"{at['mean']:.0f}")
        rows.append([str(cell).replace("|", "/") for cell in cells])
    return head + markdown(COLUMNS, rows) + "\n"


def faults(trials: dict[str, Any]) -> dict[str, Any]:
    grouped: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for entry in trials.values():
        grouped.setdefault((entry["fault"], entry["point"]), []).append(entry)
    found: dict[str, Any] = {}
    for (fault, point), some in grouped.items():
        totals = {key: round(sum(entry[key] for entry in some), 1) for key in ("passed", "strikes", "seconds")}
        ended = dict(Counter(entry["ended"].split(":")[0] for entry in some))
        mean = round(totals["seconds"] / len(some), 1)
        found.setdefault(fault, {})[point] = {"trials": len(some), "ended": ended, "mean": mean, **totals}
    return found
