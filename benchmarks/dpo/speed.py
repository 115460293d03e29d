"""Interleaved trainings and reference passes of both sides."""

import json
import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks.dpo.material import Material, make_reference
from benchmarks.processes import measured, one_core

MODULE = "benchmarks.dpo.sides"
# Pairs that TRL is fastest with, in a forward pass of the training and of the reference pass: of 1, 2, 4, 8 and 16 on one core.
AT_ONCE = {"raschka": (2, 4), "pandalm": (1, 2), "oasst": (1, 1)}
# TRL's default batch size; of long pairs, most of it is padding.
DEFAULT_AT_ONCE = (8, 8)
TRL, TRL_DEFAULTS = "trl", "trl, defaults"


def speed(rounds: int, material: Material, name: str) -> dict[str, Any]:
    """Time one epoch and one reference pass on each side: pairs/s, and memory of the training process."""
    make_reference(material, name)
    found: dict[str, list[dict[str, Any]]] = {"snaketune": [], "snaketune, reference": [], TRL: [], TRL_DEFAULTS: []}
    with one_core():
        for number in range(rounds):
            for side in found:
                one = run_side(side, material, name, found["snaketune"])
                found[side].append(one)
                print(
                    f"  {name}, round {number + 1}: {side} {one['pairs_per_s']:.2f} pairs/s",
                    file=sys.stderr,
                    flush=True,
                )
    return figures(name, found)


def run_side(side: str, material: Material, name: str, ours: list[dict[str, Any]]) -> dict[str, Any]:
    """Run one side in a process. Args: ours: our earlier results; TRL takes the pairs in the order of the first."""
    arguments: dict[str, Any] = {"run": name}
    if side in (TRL, TRL_DEFAULTS):
        batch_size, reference_batch_size = AT_ONCE[name] if side == TRL else DEFAULT_AT_ONCE
        arguments |= {"order": ours[0]["order"], "batch_size": batch_size, "reference_batch_size": reference_batch_size}
        side = TRL
    return measured(MODULE, side, material.folder, write_arguments(material, arguments))


def write_arguments(material: Material, arguments: dict[str, Any]) -> Path:
    """Write the arguments of a side into a file."""
    path = material.folder / "arguments.json"
    path.write_text(json.dumps(arguments), encoding="utf-8")
    return path


def figures(name: str, found: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return figures over all rounds, against TRL at its fastest and with its defaults."""
    ours, passes = found["snaketune"], found["snaketune, reference"]
    train = {"snaketune": median(ours, "pairs_per_s")}
    reference = {"snaketune": median(passes, "pairs_per_s")}
    memory = {"snaketune": median(ours, "peak_rss_bytes")}
    ratios = {}
    for side, what in ((TRL, "trl"), (TRL_DEFAULTS, "trl_defaults")):
        train[side] = median(found[side], "pairs_per_s")
        reference[side] = median([one["reference"] for one in found[side]], "pairs_per_s")
        memory[side] = median(found[side], "peak_rss_bytes")
        ratios |= {
            f"train_speedup_vs_{what}_{name}": train["snaketune"] / train[side],
            f"ref_speedup_vs_{what}_{name}": reference["snaketune"] / reference[side],
            f"peak_rss_ratio_vs_{what}_{name}": memory["snaketune"] / memory[side],
        }
    return ratios | {
        "pairs": ours[0]["pairs"],
        "pairs_per_s": train,
        "reference_pairs_per_s": reference,
        "peak_rss_gb": {side: bytes_ / 1e9 for side, bytes_ in memory.items()},
        "pairs_at_once": {TRL: AT_ONCE[name], TRL_DEFAULTS: DEFAULT_AT_ONCE},
        "rounds": found,
    }


def median(some: list[dict[str, Any]], key: str) -> float:
    return statistics.median(one[key] for one in some)
