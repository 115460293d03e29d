"""The data path beside its peers, on one thread, both sides in turn, medians.

    make bench-data

Peers: TRL's own preparation of an SFT dataset (`SFTTrainer._prepare_dataset`: chat template, tokens, labels, packing) and
sentencepiece's own batch encoder. The rows are gsm8k and dolly, below `data/` as `config/recipes/gsm8k-local.yaml` has them,
each repetition with another number in front, or lognormal lengths. Writes results/bench/data.json. Everything takes over half
an hour; `--only` runs some of it.
"""

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.data_path.rows import FILES
from benchmarks.data_path.sequences import memory, plan
from benchmarks.data_path.texts import edited, prepare, tokenize
from benchmarks.results import Goals, options_of, require, run_parts, table

GOALS: Goals = {
    "plan_sequences_per_s": ("at least", 10e6),
    "plan_efficiency_of_bound": ("at least", 0.999),
    "prepare_speedup_vs_trl": ("at least", 8),
    "tokenize_speedup_vs_sentencepiece": ("at least", 5),
    "peak_rss_gb_1e7": ("at most", 2),
}


MEASURES: dict[str, Callable[[int, Path, Path], dict[str, Any]]] = {
    "plan": plan, "tokenize": tokenize, "edited": edited, "prepare": prepare, "memory": memory,
}  # fmt: skip


def main() -> None:
    options = options_of(__doc__, "results/bench/data.json", "gsm8k and dolly_hhrlhf_small", MEASURES).parse_args()
    require(options.data, FILES)

    def measured(part: str) -> dict[str, Any]:
        with tempfile.TemporaryDirectory(dir=".") as folder:
            return MEASURES[part](options.rounds, Path(folder).resolve(), options.data.resolve())

    measures = {part: partial(measured, part) for part in MEASURES}
    print(table(run_parts("benchmarks.data_path", options, measures, GOALS), GOALS))


if __name__ == "__main__":
    main()
