"""SFT on the packed engine beside TRL's SFTTrainer, on one core and one thread, in turn, medians; and the demo.

    make bench-sft

Both sides start from the same weights (6.82M parameters), train on gsm8k in float32 with AdamW at one learning rate, and
supervise the same tokens; each in a process of its own, through its own trainer, whatever that does besides computing. TRL
tokenizes and packs by its own means (packing "bfd", without padding, as it documents it), or pads batches of 8 conversations.
gsm8k is below `data/` as `config/recipes/gsm8k-local.yaml` has it. Writes results/bench/sft.json; `--only` runs some of it.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.results import Goals, made_on, read_details, table, write
from benchmarks.sft.demo import demo
from benchmarks.sft.material import FILE, made
from benchmarks.sft.speed import speed
from benchmarks.sft.startup import startup

# Goal of each figure, and whether it is a minimum or a maximum.
GOALS: Goals = {
    "cpu_speedup_vs_trl_packed": ("at least", 3.5),
    "cpu_speedup_vs_trl_unpacked": ("at least", 4),
    "cpu_share_of_gemm_peak": ("at least", 0.65),
    "cpu_peak_rss_ratio_vs_trl": ("at most", 0.7),
    "startup_s_ratio_vs_trl": ("at most", 0.3),
    "startup_s_ratio_vs_trl_shards_there": ("at most", 0.3),
    "demo_s": ("at most", 240),
    "demo_exact_match_sft": ("at least", 0.9),
    "demo_exact_match_dpo": ("at least", 0.9),
    "demo_exact_match_gained_by_dpo": ("at least", 0),
}
PARTS = ("speed", "startup", "demo")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, default=Path("data"), help="folder with gsm8k")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", choices=PARTS)
    parser.add_argument("--out", type=Path, default=Path("results/bench/sft.json"))
    options = parser.parse_args()
    parts = options.only or PARTS
    raw = (options.data / FILE).resolve()
    if not raw.is_file() and set(parts) - {"demo"}:
        sys.exit(f"error: {raw}: not there; put gsm8k below {options.data}, or name --data")
    details = read_details(options.out)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        material = made(folder, raw) if set(parts) - {"demo"} else None
        measures: dict[str, Callable[[], dict[str, Any]]] = {
            "speed": lambda: speed(options.rounds, material),
            "startup": lambda: startup(options.rounds, folder / "startup", material),
            "demo": demo,
        }
        for part in parts:
            print(f"{part} ...", file=sys.stderr, flush=True)
            details[part] = measures[part]() | made_on("benchmarks.sft")
            write(options.out, details, GOALS)
    print(table(details, GOALS))


if __name__ == "__main__":
    main()
