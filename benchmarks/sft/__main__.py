"""SFT on the packed engine beside TRL's SFTTrainer, on one core and one thread, in turn, medians.

    make bench-sft

Both sides start from the same weights (6.82M parameters), train on gsm8k with AdamW at one learning rate, and supervise the
same tokens; each in a process of its own, through its own trainer, whatever that does besides computing. TRL tokenizes and
packs by its own means (packing "bfd", without padding, as it documents it), or pads batches of 8 conversations. gsm8k is below
`data/` as `config/recipes/gsm8k-local.yaml` has it. Writes results/bench/sft-PRECISION.json.
"""

import statistics
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.data_path.rows import GSM8K
from benchmarks.jobs import Project
from benchmarks.processes import measured, pinned
from benchmarks.results import Goals, add_precision, in_turn, medians, options_of, require, run_parts, table
from benchmarks.sft.material import made
from benchmarks.sft.sides import SIDES

# Goal of each figure, and whether it is a minimum or a maximum.
GOALS: Goals = {
    "cpu_speedup_vs_trl_packed": ("at least", 5),
    "cpu_speedup_vs_trl_unpacked": ("at least", 5),
    "cpu_mfu": ("at least", 0.65),
    "cpu_peak_rss_ratio_vs_trl": ("at most", 0.7),
}


def main() -> None:
    parser = options_of(__doc__, None, "gsm8k", ("speed",))
    add_precision(parser)
    options = parser.parse_args()
    options.out = options.out or Path(f"results/bench/sft-{options.precision}.json")
    require(options.data, [GSM8K])
    with tempfile.TemporaryDirectory() as folder:
        project = made(Path(folder), (options.data / GSM8K).resolve(), precision=options.precision)
        measures = {"speed": partial(speed, options.rounds, project)}
        print(table(run_parts("benchmarks.sft", options, measures, GOALS), GOALS))


def speed(rounds: int, project: Project, warm_up: int = 5, steps: int = 30) -> dict[str, Any]:
    """Measure real tokens/s, memory, and of our side the share of the core's peak, in rounds of all sides."""
    project.make(project.pack())
    with pinned():
        found = in_turn(
            rounds,
            {name: partial(measured, side, project, warm_up, steps) for name, side in SIDES.items()},
            lambda one: f"{one['tokens_per_s']:.0f} tokens/s",
        )
    rates, memory = medians(found, "tokens_per_s"), medians(found, "peak_rss_bytes")
    return {
        "cpu_speedup_vs_trl_packed": rates["snaketune"] / rates["trl packed"],
        "cpu_speedup_vs_trl_unpacked": rates["snaketune"] / rates["trl unpacked"],
        "cpu_mfu": statistics.median(one["run"]["mfu_median"] for one in found["snaketune"]),
        "cpu_peak_rss_ratio_vs_trl": memory["snaketune"] / memory["trl packed"],
        "tokens_per_s": rates,
        "peak_rss_gb": {side: bytes_ / 1e9 for side, bytes_ in memory.items()},
        "rounds": found,
    }


if __name__ == "__main__":
    main()
