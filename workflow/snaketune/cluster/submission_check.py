"""The check of requests before jobs are submitted, by `sbatch --test-only`.

The executor can't report why a group was refused: SLURM's message is lost, and a wrong account makes it wait forever.
"""

import logging
import subprocess
from collections.abc import Callable, Mapping
from typing import Any

from snaketune.cluster.resources import ResourceRequests
from snaketune.cluster.sbatch import SECONDS_BETWEEN_TRIES, why_to_wait
from snaketune.cluster.site import minutes, site_file
from snaketune.cluster.slurm import run_slurm, valid_names
from snaketune.errors import SnaketuneError
from snaketune.stages.job import Job

WAITS = f"a run waits, and tries again every {SECONDS_BETWEEN_TRIES} s"
AWAY = "Unable to contact slurm controller"
# Also said while nodes are down, and then the job would only have to wait for them.
NODES = (
    "Requested node configuration is not available",
    "Required partition not available",
    "Required node not available",
)
UP = {"idle", "mixed", "allocated", "completing", "planned", "reserved"}


def check(
    requests: ResourceRequests,
    sent: Mapping[str, Job],
    partition_of: Callable[[str, int, Mapping[str, Any]], str | None],
    log: logging.Logger,
) -> None:
    """Raise SnaketuneError if SLURM would refuse a job, or a group. If its controller is away, a warning says that nothing was
    checked.

    Args:
        sent: one job of each that is sent, by name (`ResourceRequests.submissions`).
        partition_of: the partition that the executor chooses, by name, CPUs and resources of what is sent.
    """
    checked: dict[tuple[str, ...], str] = {}
    for name, job in sent.items():
        threads, resources = requests.submitted(job)
        checked.setdefault(sbatch_options(threads, resources, partition_of(name, threads, resources)), name)
    if checked and run_slurm("scontrol", "ping") is None:
        log.warning("SLURM's controller doesn't answer (scontrol ping), so what jobs request wasn't checked")
        return
    logged = set()
    for options, name in checked.items():
        if words := refusal(options):
            if why := why_to_wait(words):
                if why not in logged:
                    logged.add(why)
                    log.warning(f"SLURM takes no more jobs at present ({why}); {WAITS}")
                continue
            sent_as = f"{name} (sbatch {' '.join(options)})"
            raise SnaketuneError(
                f"SLURM would refuse {sent_as}: {words}; correct {site_file()}: this user has {valid_names()}"
            )


def sbatch_options(threads: int, resources: Mapping[str, Any], partition: str | None) -> tuple[str, ...]:
    """The options of sbatch for a job of the executor, from its resources.

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
    """Why SLURM would refuse a job with these options, in its words; empty if it would accept it or doesn't answer."""
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
