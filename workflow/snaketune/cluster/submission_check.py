"""The check of requests before jobs are submitted, by `sbatch --test-only`; and the wait for a controller that doesn't answer.

The executor can't report why a group was refused: SLURM's message is lost, and a wrong account makes it wait forever.
"""

import getpass
import subprocess
import time
from collections.abc import Callable, Mapping
from typing import Any

from snaketune.cluster.site import minutes
from snaketune.cluster.slurm import run_slurm

SECONDS_BETWEEN_PINGS = 5
AWAY = "Unable to contact slurm controller"
# Also said while nodes are down, and then the job would only have to wait for them.
NODES = (
    "Requested node configuration is not available",
    "Required partition not available",
    "Required node not available",
)
UP = {"idle", "mixed", "allocated", "completing", "planned", "reserved"}
_answered_at = float("-inf")


def wait_for_controller(log: Callable[[str], None]) -> None:
    """Wait until slurmctld answers, and log that; it is queried at most every few seconds."""
    global _answered_at
    away_since = None
    while time.monotonic() - _answered_at > SECONDS_BETWEEN_PINGS:
        if pings():
            _answered_at = time.monotonic()
            if away_since is not None:
                log(f"SLURM's controller answers again, after {_answered_at - away_since:.0f} s")
            return
        if away_since is None:
            away_since = time.monotonic()
            log("SLURM's controller doesn't answer (scontrol ping); nothing is submitted until it does")
        time.sleep(SECONDS_BETWEEN_PINGS)


def pings() -> bool:
    """Whether slurmctld answers."""
    return run_slurm("scontrol", "ping") is not None


def sbatch_options(threads: int, resources: Mapping[str, Any], partition: str | None) -> tuple[str, ...]:
    """Return the options of sbatch for a job of the executor, from its resources.

    >>> sbatch_options(4, {"mem_mb": 3700, "runtime": 20, "gpu": 0, "gres": "gpu:1", "slurm_account": "me"}, "gpu")
    ('--account=me', '--partition=gpu', '--time=20', '--mem=3700', '--gres=gpu:1', '--cpus-per-task=4')
    """
    model = f"{resources['gpu_model']}:" if resources.get("gpu_model") else ""
    options = {
        "account": resources.get("slurm_account"),
        "qos": resources.get("qos"),
        "partition": partition,
        "time": resources["runtime"],
        "mem": resources["mem_mb"],
        "constraint": resources.get("constraint"),
        "nodes": resources.get("nodes"),
        "ntasks": resources.get("tasks"),
        "gpus": resources.get("gpu") and f"{model}{resources['gpu']}",
        "gres": resources.get("gres"),
        "cpus-per-task": threads,
    }
    return tuple(f"--{name}={value}" for name, value in options.items() if value)


def refusal(options: tuple[str, ...]) -> str:
    """Return why SLURM would refuse a job with these options, in its words; empty if it would accept it or doesn't answer."""
    command = ("sbatch", "--test-only", *options, "--wrap=true")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    asked = dict(option.removeprefix("--").split("=", 1) for option in options)
    partition = asked.get("partition", "")
    if done.returncode == 0:
        # Unless SLURM enforces the limits of partitions, it accepts a job that would wait forever.
        limit = minutes((run_slurm("sinfo", "--noheader", f"--partition={partition}", "--format=%l") or "").strip())
        exceeded = partition and isinstance(limit, int) and int(asked["time"]) > limit
        return f"partition {partition} allows {limit} minutes" if exceeded else ""
    words = "; ".join(line.removeprefix("sbatch: error: ") for line in done.stderr.strip().splitlines())
    if AWAY in words:
        return ""
    if any(said in words for said in NODES):
        states = run_slurm("sinfo", "--noheader", "--Node", f"--partition={partition}", "--format=%T") or ""
        if not {*states.split()} <= UP:
            return ""
    return words


def valid_names() -> str:
    """Return the accounts and QOS of this user and the partitions, for an error message."""
    show = ("sacctmgr", "--noheader", "--parsable2", "show", "assoc", f"user={getpass.getuser()}", "format=Account,QOS")
    rows = [line.split("|") for line in (run_slurm(*show) or "").splitlines() if "|" in line]
    names = {
        "accounts": {account for account, _ in rows if account},
        "QOS": {one for _, qos in rows for one in qos.split(",") if one},
        "partitions": {*(run_slurm("sinfo", "--noheader", "--format=%R") or "").split()},
    }
    return "; ".join(f"{name}: {', '.join(sorted(some))}" for name, some in names.items() if some)
