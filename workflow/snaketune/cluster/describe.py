"""The description of a cluster, as SLURM reports it, in the file that `cluster.site` reads: `make slurm-profile`."""

import getpass
import re
from pathlib import Path
from typing import Any

import yaml

from snaketune.cluster.site import minutes
from snaketune.cluster.slurm import fields, megabytes, run_slurm
from snaketune.errors import SnaketuneError

GPUS = re.compile(r"gpu(?::(?P<model>[^:,()]+))?:(?P<count>\d+)")
# The executor checks its jobs every three minutes or more often; for a job that SLURM has forgotten by then it waits forever.
SEEN_SECONDS = 240
HEAD = """\
# What snaketune uses of this cluster, as `make slurm-profile` read it from SLURM. Edit it as you like; nothing overwrites it.
# Used by snakemake --profile profiles/slurm. Requests are cut to these limits, and `snakemake -n` refuses jobs that can never
# start. Remove partitions that your jobs shouldn't use.
"""


def write_description(out: Path) -> str:
    """Write the file.

    Returns:
        A summary to print.
    Raises:
        SnaketuneError: the file exists, or there is no SLURM.
    """
    if out.exists():
        raise SnaketuneError(f"{out} exists, and may hold your edits; remove it, or give --out another name")
    description, excluded = describe_cluster()
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(
        HEAD + yaml.safe_dump(description, sort_keys=False, default_flow_style=None, width=120), encoding="utf-8"
    )
    lines = [
        f"{out}: partitions {', '.join(description['partitions'])}; jobs are watched by {description['status_command']}"
    ]
    lines += [
        f"account {description['account']}"
        if description.get("account")
        else "no default account; add `account: NAME` if jobs need one"
    ]
    lines += [f"excluded: {', '.join(excluded)}"] if excluded else []
    return "\n".join(lines)


def describe_cluster() -> tuple[dict[str, Any], list[str]]:
    """Return the content of the file, and the partitions that take no jobs of this user, each with the reason."""
    listed = run_slurm("scontrol", "--oneliner", "show", "partition")
    nodes = run_slurm("sinfo", "--noheader", "--exact", "--format=%R|%c|%m|%G")
    config = run_slurm("scontrol", "show", "config")
    if not (listed and nodes and config):
        raise SnaketuneError(
            "SLURM doesn't answer here (scontrol, sinfo); run this where sbatch works, or write the file yourself"
        )
    about = dict(map(str.strip, line.split("=", 1)) for line in config.splitlines() if "=" in line)
    account = _account()
    partitions: dict[str, dict[str, Any]] = {}
    gpus_per_node, excluded = {}, []
    for line in listed.splitlines():
        partition = fields(line)
        if not (name := partition.get("PartitionName")):
            continue
        if partition.get("State") != "UP":
            excluded.append(f"{name} (its state is {partition.get('State')})")
        elif (
            account
            and partition.get("AllowAccounts", "ALL") != "ALL"
            and account not in partition["AllowAccounts"].split(",")
        ):
            excluded.append(f"{name} (not for account {account})")
        else:
            partitions[name], gpus = _limits(partition, [row.split("|") for row in nodes.splitlines()])
            gpus_per_node |= {name: gpus} if gpus else {}
    if not partitions:
        raise SnaketuneError(f"no partition takes jobs of this user: {', '.join(excluded) or 'SLURM lists none'}")
    accounts = about.get("AccountingStorageType", "").endswith("slurmdbd")
    job_age = re.match(r"\d+", about.get("MinJobAge", ""))
    description = {
        **({"account": account} if account else {}),
        "status_command": "sacct" if accounts and job_age and int(job_age[0]) < SEEN_SECONDS else "squeue",
        "gpus_by": "gpus" if about.get("SelectType", "").endswith("cons_tres") else "gres",
        "gpus_per_node": gpus_per_node,
        "partitions": partitions,
    }
    return description, excluded


def _limits(partition: dict[str, str], nodes: list[list[str]]) -> tuple[dict[str, Any], int]:
    """Return the limits of a partition, as the executor plugin names them, and the most GPUs that one of its nodes has."""
    own = [row for row in nodes if row[0] == partition["PartitionName"]]
    cpus = max((int(row[1].rstrip("+")) for row in own), default=0)
    memory = max((megabytes(row[2].rstrip("+")) for row in own), default=0)
    gpus = [match for row in own for match in GPUS.finditer(row[3])]
    most = max((int(match["count"]) for match in gpus), default=0)
    count = int(partition.get("TotalNodes", 1))
    limits: dict[str, Any] = {}
    if (runtime := minutes(partition.get("MaxTime", ""))) and isinstance(runtime, int):
        limits["max_runtime"] = runtime
    if memory := min((size for size in (memory, megabytes(partition.get("MaxMemPerNode", ""))) if size > 0), default=0):
        limits["max_mem_mb"] = memory
    if cpus := min((size for size in (cpus, _number(partition.get("MaxCPUsPerNode"))) if size > 0), default=0):
        limits["max_threads"] = cpus
    limits["max_nodes"] = min(count, _number(partition.get("MaxNodes")) or count)
    if most:
        limits["max_gpu"] = most * limits["max_nodes"]
        if models := sorted({match["model"] for match in gpus if match["model"]}):
            limits["available_gpu_models"] = models
    return limits, most


def _number(text: str | None) -> int:
    return int(text) if text and text.isdecimal() else 0


def _account() -> str:
    account = run_slurm(
        "sacctmgr", "--noheader", "--parsable2", "show", "user", getpass.getuser(), "format=DefaultAccount"
    )
    return (account or "").strip()
