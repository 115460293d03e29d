"""DPO on packed trees beside TRL's DPOTrainer with precomputed reference log-probabilities, on one core and one thread.

    make bench-dpo

Both sides start from the same weights (6.82M parameters) and train on the same pairs in the same order with AdamW at one
learning rate, 16 pairs a step; each in a process of its own, in turn, medians. TRL runs with the batch size that is fastest for
it, and also with its default (`_trl_defaults`). The files are below `data/` as `config/recipes/mixed-data.yaml` has them.
Writes results/bench/dpo-PRECISION.json after every part, and a table of docs/benchmarks.md; `--only` runs some of it,
`--quick` all of it on a few pairs, into a file of its own, to see that it runs.
"""

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.dpo.material import SOURCES, made
from benchmarks.dpo.measure import SWEPT, curve, speed, sweep
from benchmarks.jobs import Project
from benchmarks.results import (
    ROOT,
    Goals,
    Parts,
    add_precision,
    keep_table,
    options_of,
    require,
    run_parts,
    table,
    write,
)

# A sweep of trainings that take half a minute here; those of the other one take a few seconds. At 1e-4, as there, four epochs
# overfit, and the variants change places after the last rung of a race (docs/LOG.md).
LONGER = 4
LONGER_RATE = 3e-5
PEERS = ("trl", "trl_defaults")
FASTER = {"raschka": 5, "pandalm": 8, "oasst": 7}
# Goal of each figure, and whether it is a minimum or a maximum.
GOALS: Goals = {
    "curve_max_abs_diff_vs_trl": ("at most", 1e-4),
    **{f"train_speedup_vs_{peer}_{name}": ("at least", goal) for peer in PEERS for name, goal in FASTER.items()},
    **{f"ref_speedup_vs_{peer}_{name}": ("at least", 6) for peer in PEERS for name in SOURCES},
    **{
        key + longer: goal
        for longer in ("", f"_{LONGER}_epochs")
        for key, goal in {
            "sweep8_speedup_vs_trl": ("at least", 5),
            "sweep8_race_speedup_vs_trl": ("at least", 10),
            "race_share_of_steps": ("at most", 0.4),
        }.items()
    },
    **{f"peak_rss_ratio_vs_{peer}": ("at most", 0.7) for peer in PEERS},
}
# Pairs that are trained on: so many that each side takes seconds, and TRL not minutes; and those of a rehearsal, of which a
# race holds out a third and needs 20.
PAIRS = {"raschka": 160, "pandalm": 96, "oasst": 48, "sweep": 384, "race": 576}
FEW = 90
DOCUMENT = ROOT / "docs/benchmarks.md"


def main() -> None:
    parser = options_of(__doc__, None, "the data sets", parts(None, 1))
    add_precision(parser)
    parser.add_argument("--quick", action="store_true", help="few pairs, one round: no figures")
    options = parser.parse_args()
    require(options.data, [file for source in SOURCES.values() for file in source["files"]])
    # Products in bfloat16 round each loss.
    goals = GOALS | ({"curve_max_abs_diff_vs_trl": ("at most", 1e-3)} if options.precision == "auto" else {})
    kind = "rehearsal" if options.quick else options.precision
    options.out = options.out or Path(f"results/bench/dpo-{kind}.json")
    runs = {
        name: (SWEPT if name in ("sweep", "race") else name, FEW if options.quick else count)
        for name, count in PAIRS.items()
    }
    with tempfile.TemporaryDirectory() as name:
        project = made(Path(name), options.data, runs, precision=options.precision)
        measures = parts(project, 1, steps=3) if options.quick else parts(project, options.rounds)
        details = run_parts("benchmarks.dpo", options, measures, goals)
    details["memory"] = memory(details)
    write(options.out, details, goals)
    found = table(details, goals)
    if not options.quick:
        keep_table(DOCUMENT, f"bench-dpo-{options.precision}", found)
    print(found)


def parts(project: Project | None, rounds: int, steps: int = 20) -> Parts:
    return {
        "curve": partial(curve, project, "raschka", steps),
        **{f"speed-{name}": partial(speed, rounds, project, name) for name in SOURCES},
        "sweep": partial(sweep, project, "sweep", "race"),
        f"sweep-{LONGER}-epochs": partial(sweep, project, "sweep", "race", epochs=LONGER, learning_rate=LONGER_RATE),
    }


def memory(details: dict[str, Any]) -> dict[str, Any]:
    """Return the memory of the data set that is worst for our side; nothing until all are measured."""
    if not all(f"speed-{name}" in details for name in SOURCES):
        return {}
    ratios = {peer: f"peak_rss_ratio_vs_{peer}" for peer in PEERS}
    return {key: max(details[f"speed-{name}"][f"{key}_{name}"] for name in SOURCES) for key in ratios.values()}


if __name__ == "__main__":
    main()
