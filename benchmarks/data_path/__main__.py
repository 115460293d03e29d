"""The data path beside its peers, on one thread, both sides in turn, medians.

    make bench-data

Peers: TRL's own preparation of an SFT dataset (`SFTTrainer._prepare_dataset`: chat template, tokens, labels, packing) and
`pack_dataset`, sentencepiece's own batch encoder, and `datasets` with a torch loader. The rows are gsm8k and dolly, below
`data/` as `config/recipes/gsm8k-local.yaml` has them, each repetition with another number in front, or lognormal lengths.
Writes results/bench/data.json. Everything takes about three quarters of an hour; `--only` runs some of it.
"""

import argparse
import json
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.data_path.memory import memory
from benchmarks.data_path.peers import pack, plan, prepare, read_rows, tokenize
from benchmarks.data_path.rows import FILES

GOALS = {
    "plan_sequences_per_s": 10e6,
    "plan_efficiency_of_bound": 0.999,
    "pack_speedup_vs_trl": 20,
    "prepare_speedup_vs_trl": 8,
    "tokenize_speedup_vs_sentencepiece": 5,
    "peak_rss_gb_1e7": 2,
    "read_rows_speedup_vs_datasets": 10,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, default=Path("data"), help="folder with gsm8k and dolly_hhrlhf_small")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", choices=("plan", "pack", "prepare", "tokenize", "memory", "read"))
    parser.add_argument("--out", type=Path, default=Path("results/bench/data.json"))
    options = parser.parse_args()
    data = options.data.resolve()
    if missing := [str(data / name) for name in FILES if not (data / name).is_file()]:
        sys.exit(f"error: {', '.join(missing)}: not there; put gsm8k and dolly below {options.data}, or name --data")
    known = json.loads(options.out.read_text(encoding="utf-8")) if options.out.is_file() else {"details": {}}
    details = known["details"]
    rounds = options.rounds
    with tempfile.TemporaryDirectory(dir=".") as name:
        folder = Path(name).resolve()

        def folder_of(of: str) -> Path:
            (folder / of).mkdir()
            return folder / of

        measures: dict[str, Callable[[], dict[str, Any]]] = {
            "plan": lambda: plan(rounds),
            "read": lambda: read_rows(rounds, folder_of("read"), data),
            "tokenize": lambda: tokenize(rounds, folder_of("tokenize"), data),
            "prepare": lambda: prepare(rounds, folder_of("prepare"), data),
            "pack": lambda: pack(rounds, folder_of("pack")),
            "memory": lambda: memory(folder_of("memory"), data),
        }
        for of in options.only or measures:
            print(f"{of} ...", file=sys.stderr, flush=True)
            details[of] = measures[of]()
            shutil.rmtree(folder / of, ignore_errors=True)
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(summary(details), indent=2) + "\n", encoding="utf-8")
    for key, goal in GOALS.items():
        print(f"{key:36} {known_or_none(summary(details), key)}   goal {goal:g}")


def known_or_none(found: dict[str, Any], key: str) -> str:
    return f"{found[key]:.4g}" if key in found else "not measured"


def summary(details: dict[str, Any]) -> dict[str, Any]:
    """Return the seven figures, as far as they were measured, and their details."""
    figures: dict[str, Any] = {}
    if "plan" in details:
        figures |= {key: details["plan"][key] for key in ("plan_sequences_per_s", "plan_efficiency_of_bound")}
    for of, peer, key in (
        ("pack", "trl", "pack_speedup_vs_trl"),
        ("prepare", "trl", "prepare_speedup_vs_trl"),
        ("tokenize", "sentencepiece", "tokenize_speedup_vs_sentencepiece"),
        ("read", "datasets", "read_rows_speedup_vs_datasets"),
    ):
        if of in details:
            figures[key] = details[of]["speedup"][peer]
    if "memory" in details:
        figures["peak_rss_gb_1e7"] = max(details["memory"]["peak_rss_gb"].values())
    machine = {
        "machine": platform.machine(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("numpy", "pyarrow", "tokenizers", "trl", "datasets")},
        "date": time.strftime("%Y-%m-%d"),
    }
    return figures | {"goals": GOALS, "details": details, "made_on": machine}


if __name__ == "__main__":
    main()
