"""Nodes that differ: `python -m snaketune doctor --nodes N` has each of N nodes of a SLURM cluster do the same small work.

    probe    a matrix product, a copy in memory, a file read back          half a second
    steps    twenty steps of a small transformer, one GPU or the CPU       a few seconds

A node that is more than 5% from the median in any of it (of the disk, half) is named, with the figure, and with what else
differs (clock, power limit, temperature, ECC, driver).
"""

import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from snaketune.cluster.site import read_site, site_file
from snaketune.errors import SnaketuneError

TOLERANCE = 0.05
# A disk read once after it was written differs by more from itself.
DISK_TOLERANCE = 0.5
STEPS, WARMUP = 20, 3
# Width, heads, layers, rows and tokens of the transformer, where there is a GPU and where there is none.
ON_GPU, ON_CPU = (2048, 16, 4, 8, 1024), (256, 4, 2, 2, 128)
QUERIED = ("name", "driver_version", "clocks.sm", "clocks.max.sm", "power.limit", "temperature.gpu", "ecc.mode.current")
FIGURES = {
    "matmul_flops_per_second": "matrix products",
    "copy_bytes_per_second": "copies in memory",
    "disk_bytes_per_second": "reading the disk",
    "steps_per_second": "training steps",
}


def measure_node(place: Path) -> dict[str, Any]:
    """What this node does, and what it is."""
    import torch

    from snaketune.models.devices import resolve_compute
    from snaketune.models.speed_probe import probe

    compute = resolve_compute("auto")
    found = {"node": os.environ.get("SLURMD_NODENAME", socket.gethostname()), "device": compute.device.type} | probe(
        compute.device, place
    )
    found["steps_per_second"] = _steps(torch, compute)
    return found | {"gpu": _gpu()}


def _steps(torch: Any, compute: Any) -> float:
    width, heads, layers, rows, tokens = ON_GPU if compute.device.type == "cuda" else ON_CPU
    layer = torch.nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
    model = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).to(compute.device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    batch = torch.randn(rows, tokens, width, device=compute.device)
    started = 0.0
    for step in range(WARMUP + STEPS):
        if step == WARMUP:
            _wait(torch, compute)
            started = time.perf_counter()
        with compute.autocast():
            loss = model(batch).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    _wait(torch, compute)
    return round(STEPS / (time.perf_counter() - started), 3)


def _wait(torch: Any, compute: Any) -> None:
    if compute.device.type != "cpu":
        torch.accelerator.synchronize(compute.device)


def _gpu() -> dict[str, str]:
    """What the driver says of the first GPU that is seen; nothing without one."""
    if not shutil.which("nvidia-smi"):
        return {}
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0]
    command = [
        "nvidia-smi",
        f"--query-gpu={','.join(QUERIED)}",
        "--format=csv,noheader",
        *(["--id", first] if first else []),
    ]
    said = subprocess.run(command, capture_output=True, text=True).stdout.strip().splitlines()
    return dict(zip(QUERIED, map(str.strip, said[0].split(",")))) if said else {}


def measure_nodes(count: int) -> list[dict[str, Any]]:
    """What each of so many nodes of the cluster says; partition, account and GPUs as the profile's file has them.

    Raises:
        SnaketuneError: there is no SLURM, or it gives no such job.
    """
    if not shutil.which("srun"):
        raise SnaketuneError(
            "--nodes: there is no SLURM here (srun isn't found); without it, this node alone is looked at"
        )
    file = site_file() or Path("profiles/slurm/cluster.yaml")
    if not file.is_file():
        raise SnaketuneError(
            f"{file} isn't there; `make slurm-profile` asks SLURM for partitions and GPUs and writes it"
        )
    told = srun_command(count, read_site(file))
    done = subprocess.run([*told, sys.executable, "-m", "snaketune", "doctor"], capture_output=True, text=True)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or len(found) < count:
        raise SnaketuneError(f"--nodes {count}: {len(found)} nodes answered; SLURM says: {done.stderr.strip()[-600:]}")
    return found


def srun_command(count: int, site: Any) -> list[str]:
    """The command that runs a task on each of so many nodes, on those with GPUs where there are any."""
    with_gpus = [name for name in site.partitions if site.gpus_per_node.get(name)]
    partition = (with_gpus or list(site.partitions))[0]
    gpus = ["--gres=gpu:1" if site.gpus_by == "gres" else "--gpus-per-node=1"] if with_gpus else []
    named = {"account": site.account, "qos": site.qos, "constraint": site.constraint if with_gpus else None}
    return [
        *(
            "srun",
            f"--nodes={count}",
            f"--ntasks={count}",
            "--ntasks-per-node=1",
            f"--partition={partition}",
            "--time=10",
        ),
        *("--cpus-per-task=2", "--mem=3000", "--job-name=snaketune-doctor", *gpus),
        *(f"--{name}={value}" for name, value in named.items() if value),
    ]


def describe_outliers(nodes: list[dict[str, Any]]) -> list[str]:
    """A sentence for each node that is far from the median, with what else is different about it.

    >>> usual = {"device": "cuda", "matmul_flops_per_second": 100.0, "gpu": {"power.limit": "700 W"}}
    >>> slow = usual | {"node": "c", "matmul_flops_per_second": 70.0, "gpu": {"power.limit": "400 W"}}
    >>> describe_outliers([usual | {"node": "a"}, usual | {"node": "b"}, slow])
    ['c: matrix products 30% slower than the median; power.limit is 400 W there, elsewhere 700 W']
    """
    found = []
    for node in nodes:
        off = []
        for key, what in FIGURES.items():
            values = [one[key] for one in nodes if key in one]
            apart = DISK_TOLERANCE if key == "disk_bytes_per_second" else TOLERANCE
            if key in node and abs(share := node[key] / statistics.median(values) - 1) > apart:
                off.append(f"{what} {abs(share):.0%} {'faster' if share > 0 else 'slower'} than the median")
        if off:
            found.append("; ".join([f"{node['node']}: {', '.join(off)}", *_otherwise(node, nodes)]))
    return found


def _otherwise(node: dict[str, Any], nodes: list[dict[str, Any]]) -> list[str]:
    """What the driver says of its GPU, where most say something else."""
    found = []
    for key, value in node["gpu"].items():
        usual = statistics.mode(one["gpu"].get(key, "") for one in nodes)
        if usual != value:
            found.append(f"{key} is {value} there, elsewhere {usual}")
    return found


def table(nodes: list[dict[str, Any]]) -> str:
    """All figures."""
    lines = ["| node | " + " | ".join(FIGURES.values()) + " | GPU |", "|---|" + "---|" * len(FIGURES) + "---|"]
    for node in sorted(nodes, key=lambda one: one["node"]):
        cells = [f"{node[key]:,.4g}" for key in FIGURES]
        lines.append(f"| {node['node']} | {' | '.join(cells)} | {', '.join(node['gpu'].values())} |")
    return "\n".join(lines)
