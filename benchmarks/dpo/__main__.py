"""DPO on packed trees beside TRL's DPOTrainer with precomputed reference log-probabilities, on one core and one thread.

    make bench-dpo

Both sides start from the same weights (6.82M parameters) and train on the same pairs in the same order in float32 with AdamW
at one learning rate, 16 pairs a step; each in a process of its own, in turn, medians. TRL runs with the batch size
that is fastest for it, and also with its default (`_trl_defaults`). The files are below `data/` as
`config/recipes/mixed-data.yaml` has them. Writes results/bench/dpo.json after every part, and the table in
docs/benchmarks.md; `--only` runs some of it, `--quick` all of it on a few pairs, into a file of its own, to see that it runs.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.data_path.rows import ROOT
from benchmarks.dpo.bound import bound
from benchmarks.dpo.curve import curve
from benchmarks.dpo.material import SOURCES, Material, made
from benchmarks.dpo.speed import speed
from benchmarks.dpo.sweep import SWEPT, sweep
from benchmarks.results import Goals, keep_table, made_on, read_details, table, write

PEERS = ("trl", "trl_defaults")
FASTER = {"raschka": 5, "pandalm": 8, "oasst": 7}
# Goal of each figure, and whether it is a minimum or a maximum.
GOALS: Goals = {
    "curve_max_abs_diff_vs_trl": ("at most", 1e-4),
    **{f"train_speedup_vs_{peer}_{name}": ("at least", goal) for peer in PEERS for name, goal in FASTER.items()},
    **{f"ref_speedup_vs_{peer}_{name}": ("at least", 6) for peer in PEERS for name in SOURCES},
    **{f"share_of_bound_{name}": ("at least", 0.97) for name in SOURCES},
    "sweep8_speedup_vs_trl": ("at least", 10),
    **{f"peak_rss_ratio_vs_{peer}": ("at most", 0.7) for peer in PEERS},
}
# Pairs that are trained on: so many that each side takes seconds, and TRL not minutes.
PAIRS = {"raschka": 160, "pandalm": 96, "oasst": 48}
SWEPT_PAIRS = 384
# Pairs of a rehearsal.
FEW = 16
DOCUMENT = ROOT / "docs/benchmarks.md"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, default=Path("data"), help="folder with the data sets")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", choices=parts(1), metavar="PART", help=", ".join(parts(1)))
    parser.add_argument("--quick", action="store_true", help="few pairs, one round: no figures")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    missing = [file for source in SOURCES.values() for file in source["files"] if not (options.data / file).is_file()]
    if missing:
        sys.exit(f"error: {options.data / missing[0]}: not there; put it there, or name --data")
    out = options.out or Path(f"results/bench/dpo{'-rehearsal' if options.quick else ''}.json")
    details = read_details(out)
    runs = {name: (name, FEW if options.quick else PAIRS[name]) for name in SOURCES}
    runs["sweep"] = (SWEPT, FEW if options.quick else SWEPT_PAIRS)
    measures = parts(1, steps=3) if options.quick else parts(options.rounds)
    with tempfile.TemporaryDirectory() as name:
        material = made(Path(name), options.data, runs)
        for part in options.only or measures:
            print(f"{part} ...", file=sys.stderr, flush=True)
            details[part] = measures[part](material) | made_on("benchmarks.dpo")
            details["memory"] = memory(details)
            write(out, details, GOALS)
    found = table(details, GOALS)
    if not options.quick:
        keep_table(DOCUMENT, "bench-dpo", found)
    print(found)


def parts(rounds: int, steps: int = 20) -> dict[str, Callable[[Material], dict[str, Any]]]:
    """Return the measurements by name, quick ones first."""
    return {
        **{f"bound-{name}": lambda material, name=name: bound(material, name) for name in SOURCES},
        "curve": lambda material: curve(material, "raschka", steps),
        **{f"speed-{name}": lambda material, name=name: speed(rounds, material, name) for name in SOURCES},
        "sweep": lambda material: sweep(material, "sweep"),
    }


def memory(details: dict[str, Any]) -> dict[str, Any]:
    """Return the memory of the data set that is worst for our side."""
    if not all(f"speed-{name}" in details for name in SOURCES):
        return {}
    return {
        f"peak_rss_ratio_vs_{peer}": max(
            details[f"speed-{name}"][f"peak_rss_ratio_vs_{peer}_{name}"] for name in SOURCES
        )
        for peer in PEERS
    }


if __name__ == "__main__":
    main()
