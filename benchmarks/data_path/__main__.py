"""The data path beside its peers, on one thread, both sides in turn, medians.

    make bench-data

Peers: TRL's own preparation of an SFT dataset (`SFTTrainer._prepare_dataset`: chat template, tokens, labels, packing) and
`pack_dataset`, sentencepiece's own batch encoder, and `datasets` with a torch loader. The rows are gsm8k and dolly, below
`data/` as `config/recipes/gsm8k-local.yaml` has them, each repetition with another number in front, or lognormal lengths.
Writes results/bench/data.json. Everything takes about three quarters of an hour; `--only` runs some of it.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.data_path.rows import FILES
from benchmarks.data_path.sequences import memory, pack, plan, read_rows
from benchmarks.data_path.texts import prepare, tokenize
from benchmarks.results import Goals, Parts, options_of, require, run_parts, table

GOALS: Goals = {
    "plan_sequences_per_s": ("at least", 10e6),
    "plan_efficiency_of_bound": ("at least", 0.999),
    "pack_speedup_vs_trl": ("at least", 20),
    "prepare_speedup_vs_trl": ("at least", 8),
    "tokenize_speedup_vs_sentencepiece": ("at least", 5),
    "peak_rss_gb_1e7": ("at most", 2),
    "read_rows_speedup_vs_datasets": ("at least", 10),
}


def main() -> None:
    parser = options_of(__doc__, "results/bench/data.json", "gsm8k and dolly_hhrlhf_small")
    parser.add_argument("--only", nargs="*", choices=("plan", "pack", "prepare", "tokenize", "memory", "read"))
    options = parser.parse_args()
    require(options.data, FILES)
    data, rounds = options.data.resolve(), options.rounds

    def in_folder(measure: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
        with tempfile.TemporaryDirectory(dir=".") as folder:
            return measure(Path(folder).resolve())

    measures: Parts = {
        "plan": lambda: plan(rounds),
        "read": lambda: in_folder(lambda folder: read_rows(rounds, folder, data)),
        "tokenize": lambda: in_folder(lambda folder: tokenize(rounds, folder, data)),
        "prepare": lambda: in_folder(lambda folder: prepare(rounds, folder, data)),
        "pack": lambda: in_folder(lambda folder: pack(rounds, folder)),
        "memory": lambda: in_folder(lambda folder: memory(folder, data)),
    }
    print(table(run_parts("benchmarks.data_path", options, measures, GOALS), GOALS))


if __name__ == "__main__":
    main()
