"""Find runs on hosts that are slower than other hosts with the same device, by the probe that each run makes at its start.

A run is compared with the other hosts that have the same GPU model (on CPU: processor model), if there are at least MIN_HOSTS.
Each host counts once, by the median of its runs, and isn't compared with itself: runs on one host differ only by what else ran
there.
"""

from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any

from snaketune.report.judge.facts import is_gpu, is_number
from snaketune.report.judge.rules import ReportFinding
from snaketune.report.text import clean, percent, short

# With three hosts, the median is sound even if one of them is slow.
MIN_HOSTS = 3
# Share below the median of the others from which a host is slow. Repeated probes of one host vary by 1 to 2 %.
SLOW = 0.05
# A single read of a file that was just written is a noisy measurement.
SLOW_DISK = 0.5
MEASURED = {
    "matmul_flops_per_second": ("matrix multiplication", "FLOP/s"),
    "copy_bytes_per_second": ("memory copy", "B/s"),
    "disk_bytes_per_second": ("disk read", "B/s"),
}


def slow_nodes(runs: Iterable[tuple[str, Mapping[str, Any]]]) -> list[ReportFinding]:
    """The findings about runs on slow hosts.

    Args:
        runs: Label and run.json of each run. Runs without `probe`, host or device model are skipped.
    """
    by_model: dict[str, list[tuple[str, str, Mapping[str, Any]]]] = {}
    for label, run in runs:
        model, host = clean(run.get("device" if is_gpu(run) else "processor") or ""), run.get("host")
        if model and host and isinstance(run.get("probe"), Mapping):
            by_model.setdefault(model, []).append((label, str(host), run["probe"]))
    return [
        ReportFinding(kind="slow node", where=label, message=text)
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
    if len(usual) <= MIN_HOSTS:
        return []
    slow = []
    for label, host, value in known:
        middle = median(own for other, own in usual.items() if other != host)
        if value < (1 - (SLOW_DISK if key == "disk_bytes_per_second" else SLOW)) * middle:
            text = (
                f"ran on a slow node: {what} at {short(value)}{unit}, {percent(1 - value / middle)} below the median "
                f"of {len(usual) - 1} other hosts with {model}, {short(middle)}{unit}"
            )
            slow.append((label, text))
    return slow
