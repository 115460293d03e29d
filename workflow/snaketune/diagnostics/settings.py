"""The settings that can change the speed of a run: for each, what changing it brings, how that is known, and what to do.

Variants are compared within a round, in which they ran one after the other, and a figure is the median over rounds with the
lowest and the highest, so changes of the machine between rounds favour no variant.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

from snaketune.stages.specs import Variant

# The file in which the `timing` stage stores what it measured, and its content.
MEASURED = "measured.json"
Timing = dict[str, Any]


def spread(values: list[float]) -> dict[str, float]:
    return {"median": round(median(values), 4), "least": round(min(values), 4), "most": round(max(values), 4)}


def figures_of(timings: list[Timing], baseline: list[Timing]) -> dict[str, dict[str, float]]:
    """What fitting timings measured, one per round, as in `baseline`: each figure as `spread` returns it."""
    speeds = [(timing["tokens_per_second"], other["tokens_per_second"]) for timing, other in zip(timings, baseline)]
    return {key: spread([timing[key] for timing in timings]) for key in ("tokens_per_second", "memory_gb")} | {
        "gain_percent": spread([100 * (speed / usual - 1) for speed, usual in speeds])
    }


# Effects below this many percent are noise.
WORTH = 5.0
# By the key of a setting that is slow on most machines: how it limits a run.
LIMITS = {
    "packing.strategy": "padding: each row of a batch is as long as its longest",
    "training.gradient_checkpointing": "recomputed activations, though they fit in memory",
    "operation.activation_offloading": "activations that are moved, though they fit in memory",
    "training.precision": "float32 products where the device has faster ones",
    "training.optimizer": "an optimizer in many small kernels",
    "training.compile": "layers in many small kernels, which aren't compiled",
}


@dataclass(frozen=True)
class Setting:
    """One setting of a run.

    Attributes:
        brings_percent: the gain in trained tokens per second after `do`; 0 if the setting is right, None if unknown.
        limit: the description of it as the run's main limit; empty if it is none.
        figures: of a variant that was tried, see `figures_of`.
    """

    setting: str
    set_to: str
    brings_percent: float | None
    how: Literal["measured", "counted", "estimated", "not known here"]
    do: str = ""
    limit: str = ""
    figures: dict[str, Any] | None = None


def tried(key: str, variant: Variant, timings: list[Timing], baseline: list[Timing]) -> Setting:
    """The setting that a variant changes.

    Args:
        key: of the run in the config: `sft.demo`.
        timings: one per round, as in `baseline`.
    """
    changes = {name: _text(value) for name, value in variant.changes.items()}
    set_to = ", ".join(f"{name}: {_text(variant.baseline[name])} (tried {value})" for name, value in changes.items())
    if unfit := next((timing["why"] for timing in timings if not timing["fits"]), ""):
        return Setting(variant.name, f"{set_to}; doesn't fit: {unfit}", None, "measured")
    figures = figures_of(timings, baseline)
    gain = figures["gain_percent"]["median"]
    limit = LIMITS.get(next(iter(changes)), f"a setting, {set_to}")
    do = ", ".join(f"{key}.{name}: {value}" for name, value in changes.items()) if gain >= WORTH else ""
    return Setting(variant.name, set_to, gain, "measured", do, limit, figures)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def padding(key: str, pack: dict[str, Any]) -> Setting:
    """Args: pack: manifest of packed rows."""
    full, counts = pack["packing_metadata"]["packing_efficiency"] / 100, pack["counts"]["train"]
    unpacked = counts["tokens"] / max(1, counts["pieces"] * pack["row_length"])
    set_to = f"on, {full:.1%} of the rows' positions hold tokens (one document a row: {unpacked:.1%})"
    brings, do = round(100 * (1 / full - 1), 1), f"{key}.packing.length: longer rows have less padding"
    worth = brings >= WORTH
    return Setting("packing", set_to, brings, "counted", do * worth, "padding: rows that documents don't fill" * worth)


def micro_batch(key: str, curve: dict[str, Any], timing: Timing) -> Setting:
    """Args: curve: of the run's calibration."""
    rows, checkpointing = timing["micro_batch_rows"], bool(timing["gradient_checkpointing"])
    set_to, best = f"{rows} rows x {timing['accumulation']}", curve["best"]
    for trial in curve["trials"]:
        if trial["fits"] and (trial["micro_batch_rows"], trial["gradient_checkpointing"]) == (rows, checkpointing):
            gain = max(0.0, round(100 * (best["tokens_per_second"] / trial["tokens_per_second"] - 1), 1))
            do, limit = (
                f"{key}.training.micro_batch_rows: auto, or {best['micro_batch_rows']}",
                "the micro-batch: too few rows",
            )
            return Setting(
                "micro-batch", set_to, gain, "measured", do * (gain >= WORTH), f"{limit} per batch for the device"
            )
    return Setting("micro-batch", set_to, None, "not known here")


def parts_of_step(timing: Timing) -> Iterator[Setting]:
    """Yield the loader, the gaps between kernels, and for attention and small operations what their share of a step is."""
    waited, parts = timing["waited_share"], timing["parts"]
    set_to = f"{waited:.1%} of the time was spent waiting for rows"
    do, limit = "operation.load_in_memory: true, or results on a faster disk", "the loader: steps wait for rows"
    yield Setting("loader", set_to, _without(waited), "measured", do * (waited > WORTH / 100), limit)
    if parts and timing["device"] != "cpu":
        idle = max(0.0, parts["waiting"] - waited)
        set_to = f"the device waits {idle:.0%} of the time between kernels"
        do = "more rows per micro-batch, or training.compile: true" * (idle > WORTH / 100)
        limit = "small kernels: the device waits for the next one to be launched"
        yield Setting("small kernels", set_to, _without(idle), "measured", do, limit)
    # Compiled layers fuse the same operations as kernels such as Liger's.
    fused = "compiled layers" if timing["compiled"] else "none (compiled layers, or Liger's)"
    for setting, part, set_to in (
        ("attention kernel", "attention", timing["kernel"]),
        ("fused kernels", "other", fused),
    ):
        if part in parts:
            set_to += f"; {parts[part]:.0%} of a step"
            yield Setting(setting, f"{set_to}, so at most {_without(parts[part]):+.0f}%", None, "estimated")


def _without(share: float) -> float:
    """The percentage by which a step is faster without a share of its time.

    >>> _without(0.5)
    100.0
    """
    return round(100 * share / (1 - min(0.99, share)), 1)
