"""Runs on machines that are slower than their like: what each run measured of its device before it began, side by side."""

from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any

from snaketune.report.facts import is_number
from snaketune.report.rules import Suspicion
from snaketune.report.text import clean, percent, short

# Below the median of its like by so much, a machine is slow; the same one measured twice moves by a percent or two.
SLOW = 0.05
# One read of a file that was just written says little.
SLOW_DISK = 0.5
MEASURED = {
    "matmul_flops_per_second": ("matrix products", "FLOP/s"),
    "copy_bytes_per_second": ("copying memory", "B/s"),
    "disk_bytes_per_second": ("reading the disk", "B/s"),
}


def slow_nodes(runs: Iterable[tuple[str, Mapping[str, Any]]]) -> list[Suspicion]:
    """Args: runs: label and run.json of each; those without `probe` say nothing."""
    by_device: dict[str, list[tuple[str, Mapping[str, Any]]]] = {}
    for label, run in runs:
        if isinstance(run.get("probe"), Mapping):
            by_device.setdefault(clean(run.get("device")), []).append((label, run["probe"]))
    return [
        Suspicion(kind="slow node", where=label, found=text)
        for device, probed in by_device.items()
        for label, text in _slow(device, probed)
    ]


def _slow(device: str, probed: list[tuple[str, Mapping[str, Any]]]) -> list[tuple[str, str]]:
    found = []
    for key, (what, unit) in MEASURED.items():
        known = [(label, float(probe[key])) for label, probe in probed if is_number(probe.get(key))]
        if len(known) < 2:
            continue
        middle = median(value for _, value in known)
        found += [
            (
                label,
                f"this run was on a slow node: {what} at {short(value)}{unit}, {percent(1 - value / middle)} below the median "
                f"of {len(known)} runs on {device}, {short(middle)}{unit}",
            )
            for label, value in known
            if value < (1 - (SLOW_DISK if key == "disk_bytes_per_second" else SLOW)) * middle
        ]
    return found
