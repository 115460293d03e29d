"""Comparison of nodes: `python -m snaketune doctor --nodes N` has each of N nodes of a SLURM cluster do the same small work.

A node that differs by more than 5% from the median in any of it (for the disk, by half) is named, with the figure and with the
driver's settings that differ (clock, power limit, temperature, ECC, driver version).
"""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from statistics import median, mode
from typing import Any

from snaketune.cluster.site import read_site, site_file
from snaketune.errors import SnaketuneError

# Reading a disk once, right after writing, varies more on the same machine.
TOLERANCE, DISK_TOLERANCE = 0.05, 0.5
QUERIED = ("name", "driver_version", "clocks.sm", "clocks.max.sm", "power.limit", "temperature.gpu", "ecc.mode.current")
FIGURES = {
    "matmul_flops_per_second": "matrix products",
    "copy_bytes_per_second": "copies in memory",
    "disk_bytes_per_second": "reading the disk",
}


def measure_node(folder: Path) -> dict[str, Any]:
    """The measurements of this node, and its device and driver settings. Args: folder: on the disk to measure."""
    from snaketune.engine.model.device_speed import probe
    from snaketune.engine.model.devices import resolve_compute

    device = resolve_compute("auto").device
    return {
        "node": os.environ.get("SLURMD_NODENAME", socket.gethostname()),
        "device": device.type,
        **probe(device, folder),
        "gpu": _gpu(),
    }


def _gpu() -> dict[str, str]:
    if not shutil.which("nvidia-smi"):
        return {}
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0]
    command = [
        "nvidia-smi",
        f"--query-gpu={','.join(QUERIED)}",
        "--format=csv,noheader",
        *(["--id", first] * bool(first)),
    ]
    lines = subprocess.run(command, capture_output=True, text=True).stdout.strip().splitlines()
    return dict(zip(QUERIED, map(str.strip, lines[0].split(",")))) if lines else {}


def measure_nodes(count: int) -> list[dict[str, Any]]:
    """Run the measurements on this many nodes of the cluster; partition, account and GPUs are those of the profile's file."""
    if not shutil.which("srun"):
        raise SnaketuneError(
            "--nodes: there is no SLURM here (srun isn't found); without --nodes, this node alone is measured"
        )
    file = site_file() or Path("profiles/slurm/cluster.yaml")
    if not file.is_file():
        raise SnaketuneError(f"{file} doesn't exist; `make slurm-profile` writes it, with SLURM's partitions and GPUs")
    command = [*srun_command(count, read_site(file)), sys.executable, "-m", "snaketune", "doctor"]
    done = subprocess.run(command, capture_output=True, text=True)
    nodes = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or len(nodes) < count:
        raise SnaketuneError(
            f"--nodes {count}: {len(nodes)} nodes answered; SLURM's output: {done.stderr.strip()[-600:]}"
        )
    return nodes


def srun_command(count: int, site: Any) -> list[str]:
    """The command that runs one task on each of this many nodes, in a partition with GPUs if there is one."""
    with_gpus = [name for name in site.partitions if site.gpus_per_node.get(name)]
    partition = (with_gpus or list(site.partitions))[0]
    gpus = ["--gres=gpu:1" if site.gpus_by == "gres" else "--gpus-per-node=1"] if with_gpus else []
    named = {"account": site.account, "qos": site.qos, "constraint": site.constraint if with_gpus else None}
    fixed = (
        f"srun --nodes={count} --ntasks={count} --ntasks-per-node=1 --partition={partition} --time=10 --cpus-per-task=2 "
        "--mem=3000 --job-name=snaketune-doctor"
    )
    return [*fixed.split(), *gpus, *(f"--{name}={value}" for name, value in named.items() if value)]


def describe_outliers(nodes: list[dict[str, Any]]) -> list[str]:
    """A sentence for each node that is far from the median, with the driver's settings in which its GPU differs.

    >>> usual = {"device": "cuda", "matmul_flops_per_second": 100.0, "gpu": {"power.limit": "700 W"}}
    >>> slow = usual | {"node": "c", "matmul_flops_per_second": 70.0, "gpu": {"power.limit": "400 W"}}
    >>> describe_outliers([usual | {"node": "a"}, usual | {"node": "b"}, slow])
    ['c: matrix products 30% slower than the median; power.limit is 400 W there, elsewhere 700 W']
    """
    sentences = []
    for node in nodes:
        off, settings = [], []
        for key, what in FIGURES.items():
            apart = DISK_TOLERANCE if key == "disk_bytes_per_second" else TOLERANCE
            usual = median(peer[key] for peer in nodes if key in peer) if key in node else None
            if usual and abs(share := node[key] / usual - 1) > apart:
                off.append(f"{what} {abs(share):.0%} {'faster' if share > 0 else 'slower'} than the median")
        for key, value in node["gpu"].items():
            usual = mode(peer["gpu"].get(key, "") for peer in nodes)
            if usual != value:
                settings.append(f"{key} is {value} there, elsewhere {usual}")
        if off:
            sentences.append("; ".join([f"{node['node']}: {', '.join(off)}", *settings]))
    return sentences


def table(nodes: list[dict[str, Any]]) -> str:
    lines = ["| node | " + " | ".join(FIGURES.values()) + " | GPU |", "|---|" + "---|" * len(FIGURES) + "---|"]
    for node in sorted(nodes, key=lambda row: row["node"]):
        cells = [f"{node[key]:,.4g}" for key in FIGURES]
        lines.append(f"| {node['node']} | {' | '.join(cells)} | {', '.join(node['gpu'].values())} |")
    return "\n".join(lines)
