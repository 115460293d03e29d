"""Runs on hosts that are slower than others of the same kind: what each run measured of its device before it began.

A run is compared with the other hosts that have its model of card, or of processor where it ran on a CPU; with fewer than
FEWEST of them nothing is said. A host counts once, by the median of its runs, and is never compared with itself: between two
of its own runs only what else ran there differs.
"""

from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any

from snaketune.report.judge.facts import is_gpu, is_number
from snaketune.report.judge.rules import ReportFinding
from snaketune.report.text import clean, percent, short

# Of three, the median is of a sound host where one of them is slow itself.
FEWEST = 3
# Below the median of the others by so much, a host is slow; the same one measured twice moves by a percent or two.
SLOW = 0.05
# One read of a file that was just written says little.
SLOW_DISK = 0.5
MEASURED = {
    "matmul_flops_per_second": ("matrix products", "FLOP/s"),
    "copy_bytes_per_second": ("copying memory", "B/s"),
    "disk_bytes_per_second": ("reading the disk", "B/s"),
}


def slow_nodes(runs: Iterable[tuple[str, Mapping[str, Any]]]) -> list[ReportFinding]:
    """Args: runs: label and run.json of each; those without `probe`, host or a known model say nothing."""
    by_model: dict[str, list[tuple[str, str, Mapping[str, Any]]]] = {}
    for label, run in runs:
        model, host = clean(run.get("device" if is_gpu(run) else "processor") or ""), run.get("host")
        if model and host and isinstance(run.get("probe"), Mapping):
            by_model.setdefault(model, []).append((label, str(host), run["probe"]))
    return [
        ReportFinding(kind="slow node", where=label, found=text)
        for model, probed in by_model.items()
        for key in MEASURED
        for label, text in _slow(model, key, probed)
    ]


def _slow(model: str, key: str, probed: list[tuple[str, str, Mapping[str, Any]]]) -> list[tuple[str, str]]:
    what, unit = MEASURED[key]
    known = [(label, host, float(probe[key])) for label, host, probe in probed if is_number(probe.get(key))]
    by_host: dict[str, list[float]] = {}
    for _, host, value in known:
        by_host.setdefault(host, []).append(value)
    usual = {host: median(values) for host, values in by_host.items()}
    if len(usual) <= FEWEST:
        return []
    found = []
    for label, host, value in known:
        middle = median(own for other, own in usual.items() if other != host)
        if value < (1 - (SLOW_DISK if key == "disk_bytes_per_second" else SLOW)) * middle:
            text = (
                f"this run was on a slow node: {what} at {short(value)}{unit}, {percent(1 - value / middle)} below the median "
                f"of {len(usual) - 1} other hosts with {model}, {short(middle)}{unit}"
            )
            found.append((label, text))
    return found
