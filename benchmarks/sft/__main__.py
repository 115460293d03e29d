"""SFT on the packed engine beside TRL's SFTTrainer, on one core and one thread, in turn, medians; and the demo.

    make bench-sft

Both sides start from the same weights (6.82M parameters), train on gsm8k with AdamW at one learning rate, and supervise the
same tokens; each in a process of its own, through its own trainer, whatever that does besides computing. TRL tokenizes and
packs by its own means (packing "bfd", without padding, as it documents it), or pads batches of 8 conversations. gsm8k is below
`data/` as `config/recipes/gsm8k-local.yaml` has it. Writes results/bench/sft-PRECISION.json; `--only` runs some of it.
"""

import tempfile
from pathlib import Path

from benchmarks.data_path.rows import GSM8K
from benchmarks.results import Goals, Parts, add_precision, options_of, require, run_parts, table
from benchmarks.sft.material import made
from benchmarks.sft.measure import demo, speed, startup

# Goal of each figure, and whether it is a minimum or a maximum.
GOALS: Goals = {
    "cpu_speedup_vs_trl_packed": ("at least", 5),
    "cpu_speedup_vs_trl_unpacked": ("at least", 5),
    "cpu_share_of_gemm_peak": ("at least", 0.65),
    "cpu_peak_rss_ratio_vs_trl": ("at most", 0.7),
    "startup_s_ratio_vs_trl": ("at most", 0.3),
    "startup_s_ratio_vs_trl_shards_there": ("at most", 0.3),
    "demo_s": ("at most", 150),
    "demo_exact_match_sft": ("at least", 0.95),
    "demo_exact_match_dpo": ("at least", 0.95),
    "demo_exact_match_gained_by_dpo": ("at least", 0),
    "demo_share_of_time_measuring_held_out": ("at most", 0.03),
}


def main() -> None:
    parser = options_of(__doc__, None, "gsm8k", ("speed", "startup", "demo"))
    add_precision(parser)
    options = parser.parse_args()
    options.out = options.out or Path(f"results/bench/sft-{options.precision}.json")
    with tempfile.TemporaryDirectory() as name:
        folder, project = Path(name), None
        if options.only != ["demo"]:
            require(options.data, [GSM8K])
            project = made(folder, (options.data / GSM8K).resolve(), precision=options.precision)
        measures: Parts = {
            "speed": lambda: speed(options.rounds, project),
            "startup": lambda: startup(options.rounds, folder / "startup", project),
            "demo": demo,
        }
        print(table(run_parts("benchmarks.sft", options, measures, GOALS), GOALS))


if __name__ == "__main__":
    main()
