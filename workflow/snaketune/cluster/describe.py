"""A cluster as SLURM describes itself, as the file that `cluster.site` reads: `make slurm-profile`."""

import getpass
import re
from pathlib import Path
from typing import Any

import yaml

from snaketune.cluster.site import minutes
from snaketune.cluster.slurm import fields, megabytes, run_slurm
from snaketune.errors import SnaketuneError

GPUS = re.compile(r"gpu(?::(?P<model>[^:,()]+))?:(?P<count>\d+)")
# The executor looks every three minutes at the least often; what SLURM has forgotten by then it would wait for for ever.
SEEN_SECONDS = 240
HEAD = """\
# What of this cluster snaketune uses; asked of SLURM by `make slurm-profile`, and yours to edit: nothing else replaces it.
# snakemake --profile profiles/slurm reads it. Jobs are kept within these limits, and what can never start is refused by
# `snakemake -n`. Take partitions out that your jobs shouldn't use.
"""


def write_description(out: Path) -> str:
    """Write the file.

    Returns:
        What to tell of it.
    Raises:
        SnaketuneError: it is there already, or there is no SLURM.
    """
    if out.exists():
        raise SnaketuneError(
            f"{out} is there already, and may hold what you edited; remove it, or give --out another name"
        )
    told, left_out = describe_cluster()
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(HEAD + yaml.safe_dump(told, sort_keys=False, default_flow_style=None, width=120), encoding="utf-8")
    lines = [f"{out}: partitions {', '.join(told['partitions'])}; jobs are watched by {told['status_command']}"]
    lines += [
        f"account {told['account']}"
        if told.get("account")
        else "no account was found; add `account: NAME` if jobs need one"
    ]
    lines += [f"left out: {', '.join(left_out)}"] if left_out else []
    return "\n".join(lines)


def describe_cluster() -> tuple[dict[str, Any], list[str]]:
    """What the file says, and partitions that take no jobs of ours, each with the reason."""
    listed = run_slurm("scontrol", "--oneliner", "show", "partition")
    nodes = run_slurm("sinfo", "--noheader", "--exact", "--format=%R|%c|%m|%G")
    config = run_slurm("scontrol", "show", "config")
    if not (listed and nodes and config):
        raise SnaketuneError(
            "SLURM doesn't answer here (scontrol, sinfo); run this where sbatch works, or write the file by hand"
        )
    about = dict(map(str.strip, line.split("=", 1)) for line in config.splitlines() if "=" in line)
    account = _account()
    partitions: dict[str, dict[str, Any]] = {}
    gpus_per_node, left_out = {}, []
    for line in listed.splitlines():
        found = fields(line)
        if not (name := found.get("PartitionName")):
            continue
        if found.get("State") != "UP":
            left_out.append(f"{name} (its state is {found.get('State')})")
        elif (
            account and found.get("AllowAccounts", "ALL") != "ALL" and account not in found["AllowAccounts"].split(",")
        ):
            left_out.append(f"{name} (not for account {account})")
        else:
            partitions[name], gpus = _limits(found, [row.split("|") for row in nodes.splitlines()])
            gpus_per_node |= {name: gpus} if gpus else {}
    if not partitions:
        raise SnaketuneError(f"no partition takes jobs: {', '.join(left_out) or 'there is none'}")
    accounts = about.get("AccountingStorageType", "").endswith("slurmdbd")
    kept = re.match(r"\d+", about.get("MinJobAge", ""))
    told = {
        **({"account": account} if account else {}),
        "status_command": "sacct" if accounts and kept and int(kept[0]) < SEEN_SECONDS else "squeue",
        "gpus_by": "gpus" if about.get("SelectType", "").endswith("cons_tres") else "gres",
        "gpus_per_node": gpus_per_node,
        "partitions": partitions,
    }
    return told, left_out


def _limits(partition: dict[str, str], nodes: list[list[str]]) -> tuple[dict[str, Any], int]:
    """Of one partition: its limits, as the executor plugin names them, and the most GPUs that a node of it has."""
    own = [row for row in nodes if row[0] == partition["PartitionName"]]
    cpus = max((int(row[1].rstrip("+")) for row in own), default=0)
    memory = max((megabytes(row[2].rstrip("+")) for row in own), default=0)
    gpus = [found for row in own for found in GPUS.finditer(row[3])]
    most = max((int(found["count"]) for found in gpus), default=0)
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
        if models := sorted({found["model"] for found in gpus if found["model"]}):
            limits["available_gpu_models"] = models
    return limits, most


def _number(told: str | None) -> int:
    return int(told) if told and told.isdecimal() else 0


def _account() -> str:
    told = run_slurm("sacctmgr", "--noheader", "--parsable2", "show", "user", getpass.getuser(), "format=DefaultAccount")
    return (told or "").strip()
