"""The settings that can change the speed of a run: for each, what changing it brings, how that is known, and what to do.

Variants are compared within a round, in which they ran one after the other, and a figure is the median over rounds with the
lowest and the highest, so changes of the machine between rounds favour no variant. Losses are compared at equal tokens, since a
variant with longer rows has seen more tokens at the same step.
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
# The largest relative difference from the baseline's loss of a variant that counts as the same training.
SAME_LOSS = 0.05
# The largest relative spread of the machine's probe between timings; above it, the machine is reported as changed.
STEADY = 0.05
PROBES = {"matmul_flops_per_second": "matrix products", "copy_bytes_per_second": "copies in memory"}


def spread(values: list[float]) -> dict[str, float]:
    return {"median": round(median(values), 4), "least": round(min(values), 4), "most": round(max(values), 4)}


def figures_of(timings: list[Timing], baseline: list[Timing], tokens: float) -> dict[str, Any]:
    """What fitting timings measured, as `spread` returns it, and in `learns` how the loss differs from the baseline's.

    Args:
        timings: one per round, as in `baseline`.
        tokens: at which losses are compared.
    """
    figures: dict[str, Any] = {
        key: spread([timing[key] for timing in timings]) for key in ("tokens_per_second", "memory_gb")
    }
    pairs = zip(timings, baseline)
    gains = [100 * (timing["tokens_per_second"] / other["tokens_per_second"] - 1) for timing, other in pairs]
    losses, usual = ([loss_at(timing, tokens) for timing in measured] for measured in (timings, baseline))
    learns = ""
    if None in (*losses, *usual):
        learns = "its loss, or the baseline's, isn't finite"
    elif abs(median(losses) - median(usual)) > SAME_LOSS * abs(median(usual)):
        learns = f"at equal tokens its loss is {median(losses):.4g} instead of {median(usual):.4g}"
    return figures | {
        "gain_percent": spread(gains),
        "loss": None if None in losses else spread(losses),
        "learns": learns,
    }


def loss_at(measured: Timing, tokens: float) -> float | None:
    """The mean loss of a training after this many tokens, interpolated between windows; None if it isn't finite.

    >>> loss_at({"windows": [{"tokens": 50, "loss": 5.0}, {"tokens": 150, "loss": 4.0}, {"tokens": 250, "loss": 3.0}]}, 150)
    3.5
    """
    seen, previous = 0.0, None
    for window in measured["windows"]:
        # A window's loss belongs to its middle.
        middle, seen = (seen + window["tokens"]) / 2, window["tokens"]
        if middle >= tokens:
            if previous is None:
                return window["loss"]
            if None in (previous[1], window["loss"]):
                return None
            share = (tokens - previous[0]) / (middle - previous[0])
            return previous[1] + share * (window["loss"] - previous[1])
        previous = middle, window["loss"]
    return previous[1]


def compared_tokens(measured: list[Timing]) -> float:
    """The tokens that all of these trainings have seen at the middle of their last window."""
    return min((timing["windows"][-2]["tokens"] + timing["windows"][-1]["tokens"]) / 2 for timing in measured)


def machine_notes(measured: list[Timing]) -> list[str]:
    """Notes on changes of the machine, its libraries or its device between timings."""
    changes = [
        f"{what} differed by {100 * (max(values) / min(values) - 1):.0f}%: something else ran, or the clock changed"
        for key, what in PROBES.items()
        if max(values := [timing["probe"][key] for timing in measured]) > (1 + STEADY) * min(values)
    ]
    versions = {f"{name} {version}" for timing in measured for name, version in timing["libraries"].items()}
    if len(versions) > len(measured[0]["libraries"]):
        changes.append(f"libraries differed: {', '.join(sorted(versions))}")
    if len(devices := sorted({timing["device"] for timing in measured})) > 1:
        changes.append(f"devices differed: {' and '.join(devices)}")
    return [f"between timings, {change}; `snakemake doctor --forcerun timing` measures again" for change in changes]


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


def tried(key: str, variant: Variant, timings: list[Timing], baseline: list[Timing], tokens: float) -> Setting:
    """The setting that a variant changes, marked if that alters what is learned.

    Args:
        key: of the run in the config: `sft.demo`.
        timings: one per round, as in `baseline`.
        tokens: at which losses are compared.
    """
    changes = {name: _text(value) for name, value in variant.changes.items()}
    set_to = ", ".join(f"{name}: {_text(variant.baseline[name])} (tried {value})" for name, value in changes.items())
    if unfit := next((timing["why"] for timing in timings if not timing["fits"]), ""):
        return Setting(variant.name, f"{set_to}; doesn't fit: {unfit}", None, "measured")
    figures = figures_of(timings, baseline, tokens)
    gain = figures["gain_percent"]["median"]
    # Packing changes what a step learns too, by its number of tokens.
    limit = LIMITS.get(next(iter(changes)), "" if figures["learns"] else f"a setting, {set_to}")
    advice = ", ".join(f"{key}.{name}: {value}" for name, value in changes.items()) if limit and gain >= WORTH else ""
    mark = figures["learns"] and f"not comparable: {figures['learns']}"
    do = "; ".join(filter(None, (advice, mark)))
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
