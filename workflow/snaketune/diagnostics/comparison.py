"""Comparison of a variant's timings with the baseline's.

Variants are compared within a round, in which they ran one after the other, and a figure is the median over rounds with the
lowest and the highest, so changes of the machine between rounds favour no variant. Losses are compared at equal tokens, since a
variant with longer rows has seen more tokens at the same step.
"""

from statistics import median
from typing import Any

# What the `timing` stage measured.
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
    figures: dict[str, Any] = {key: spread([one[key] for one in timings]) for key in ("tokens_per_second", "memory_gb")}
    pairs = zip(timings, baseline)
    gains = [100 * (one["tokens_per_second"] / other["tokens_per_second"] - 1) for one, other in pairs]
    losses, usual = ([loss_at(one, tokens) for one in measured] for measured in (timings, baseline))
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
    """Return the mean loss of a training after this many tokens, interpolated between windows; None if it isn't finite.

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
    """Return the tokens that all of these trainings have seen at the middle of their last window."""
    return min((one["windows"][-2]["tokens"] + one["windows"][-1]["tokens"]) / 2 for one in measured)


def machine_notes(measured: list[Timing]) -> list[str]:
    """Return notes on changes of the machine, its libraries or its device between timings."""
    changes = [
        f"{what} differed by {100 * (max(values) / min(values) - 1):.0f}%: something else ran, or the clock changed"
        for key, what in PROBES.items()
        if max(values := [one["probe"][key] for one in measured]) > (1 + STEADY) * min(values)
    ]
    versions = {f"{name} {version}" for one in measured for name, version in one["libraries"].items()}
    if len(versions) > len(measured[0]["libraries"]):
        changes.append(f"libraries differed: {', '.join(sorted(versions))}")
    if len(devices := sorted({one["device"] for one in measured})) > 1:
        changes.append(f"devices differed: {' and '.join(devices)}")
    return [f"between timings, {change}; `snakemake doctor --forcerun timing` measures again" for change in changes]
