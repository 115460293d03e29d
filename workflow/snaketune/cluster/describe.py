"""The description of a cluster, as SLURM reports it, in the file that `cluster.site` reads: `make slurm-profile`."""

import getpass
import re
from pathlib import Path
from typing import Any

import yaml

from snaketune.cluster.site import minutes
from snaketune.cluster.slurm import fields, megabytes, run_slurm, valid_names
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
    """Write the file, and return a summary to print; SnaketuneError if the file exists, or there is no SLURM."""
    if out.exists():
        raise SnaketuneError(f"{out} exists, and may hold your edits; remove it, or give --out another name")
    description, excluded = describe_cluster()
    out.parent.mkdir(parents=True, exist_ok=True)
    content = yaml.safe_dump(description, sort_keys=False, default_flow_style=None, width=120)
    out.write_text(HEAD + content, encoding="utf-8")
    account = description.get("account")
    lines = [
        f"{out}: partitions {', '.join(description['partitions'])}; jobs are watched by {description['status_command']}",
        f"account {account}" if account else "no default account; add `account: NAME` if jobs need one",
        f"this user has {valid_names()}",
        *([f"excluded: {', '.join(excluded)}"] if excluded else []),
    ]
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
    show_user = ("sacctmgr", "--noheader", "--parsable2", "show", "user", getpass.getuser(), "format=DefaultAccount")
    account = (run_slurm(*show_user) or "").strip()
    show_limits = ("sacctmgr", "--noheader", "--parsable2", "show", "assoc", f"user={getpass.getuser()}")
    limits = run_slurm(*show_limits, f"account={account}", "format=MaxSubmitJobs,GrpSubmitJobs") if account else ""
    max_jobs = _least(*map(_number, (limits or "").replace("|", " ").split()))
    partitions: dict[str, dict[str, Any]] = {}
    gpus_per_node, excluded = {}, []
    for partition in map(fields, listed.splitlines()):
        if not (name := partition.get("PartitionName")):
            continue
        accounts = partition.get("AllowAccounts", "ALL")
        if partition.get("State") != "UP":
            excluded.append(f"{name} (its state is {partition.get('State')})")
        elif account and accounts != "ALL" and account not in accounts.split(","):
            excluded.append(f"{name} (not for account {account})")
        else:
            own = [row.split("|") for row in nodes.splitlines() if row.partition("|")[0] == name]
            partitions[name], gpus = _limits(partition, own)
            gpus_per_node |= {name: gpus} if gpus else {}
    if not partitions:
        raise SnaketuneError(f"no partition takes jobs of this user: {', '.join(excluded) or 'SLURM lists none'}")
    has_accounts = about.get("AccountingStorageType", "").endswith("slurmdbd")
    job_age = re.match(r"\d+", about.get("MinJobAge", ""))
    description = {
        **({"account": account} if account else {}),
        "status_command": "sacct" if has_accounts and job_age and int(job_age[0]) < SEEN_SECONDS else "squeue",
        "gpus_by": "gpus" if about.get("SelectType", "").endswith("cons_tres") else "gres",
        **({"max_jobs": max_jobs} if max_jobs else {}),
        "gpus_per_node": gpus_per_node,
        "partitions": partitions,
    }
    return description, excluded


def _limits(partition: dict[str, str], nodes: list[list[str]]) -> tuple[dict[str, Any], int]:
    """Return the limits of a partition, as the executor plugin names them, and the most GPUs that one of its nodes has."""
    cpus = max((int(row[1].rstrip("+")) for row in nodes), default=0)
    memory = max((megabytes(row[2].rstrip("+")) for row in nodes), default=0)
    gpus = [match for row in nodes for match in GPUS.finditer(row[3])]
    most = max((int(match["count"]) for match in gpus), default=0)
    runtime, count = minutes(partition.get("MaxTime", "")), int(partition.get("TotalNodes", 1))
    max_nodes = min(count, _number(partition.get("MaxNodes")) or count)
    limits = {
        "max_runtime": runtime if isinstance(runtime, int) else 0,
        "max_mem_mb": _least(memory, megabytes(partition.get("MaxMemPerNode", ""))),
        "max_threads": _least(cpus, _number(partition.get("MaxCPUsPerNode"))),
        "max_nodes": max_nodes,
        "max_gpu": most * max_nodes,
        "available_gpu_models": sorted({match["model"] for match in gpus if match["model"]}) if most else [],
    }
    return {name: limit for name, limit in limits.items() if limit or name == "max_nodes"}, most


def _least(*sizes: int) -> int:
    """Return the smallest of the sizes that are known; 0 if none is."""
    return min((size for size in sizes if size > 0), default=0)


def _number(text: str | None) -> int:
    return int(text) if text and text.isdecimal() else 0
