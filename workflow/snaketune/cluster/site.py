"""The description of a user's cluster: accounts, limits and GPUs, in a file that the user edits once; and what fits its limits.

The environment variable SNAKEMAKE_SLURM_PARTITIONS names the file, as for the SLURM executor plugin, which chooses a partition
for each job by its `partitions`; snaketune cuts requests to the same limits. The profile profiles/slurm uses `cluster.yaml`
beside it, which `make slurm-profile` writes as SLURM reports the cluster. No command-line option replaces any of it, as one
does with whole blocks of a profile.
"""

import getpass
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BeforeValidator, ConfigDict, Field, ValidationError

from snaketune.cluster.slurm import fields, megabytes, run_slurm, valid_names
from snaketune.config.base import Model, PositiveInt
from snaketune.errors import SnaketuneError
from snaketune.suggestions import unknown

GPUS = re.compile(r"gpu(?::(?P<model>[^:,()]+))?:(?P<count>\d+)")
# The executor checks its jobs every three minutes or more often; for a job that SLURM has forgotten by then it waits forever.
SEEN_SECONDS = 240
HEAD = """\
# What snaketune uses of this cluster, as `make slurm-profile` read it from SLURM. Edit it as you like; nothing overwrites it.
# Used by snakemake --profile profiles/slurm. Requests are cut to these limits, and `snakemake -n` refuses jobs that can never
# start. Remove partitions that your jobs shouldn't use.
"""

VARIABLE = "SNAKEMAKE_SLURM_PARTITIONS"
CLOCK = re.compile(r"(?:(?P<days>\d+)-)?(?P<first>\d+)(?::(?P<second>\d+))?(?::(?P<third>\d+))?")


def minutes(value: Any) -> Any:
    """Convert a time in SLURM's notation to whole minutes; other values are returned as they are.

    >>> minutes(90), minutes("1-12:00:00"), minutes("12:30:59"), minutes("45")
    (90, 2160, 750, 45)
    """
    if not isinstance(value, str) or not (match := CLOCK.fullmatch(value.strip())):
        return value
    days, first, second = (int(match[name] or 0) for name in ("days", "first", "second"))
    has_hours = match["days"] is not None or match["third"] is not None
    # Otherwise minutes, or minutes and seconds.
    return (days * 24 + first) * 60 + second if has_hours else first


class Partition(Model):
    """Limits of one partition, under the executor plugin's names; a missing limit means none. Its other keys are ignored."""

    model_config = ConfigDict(extra="ignore")

    max_runtime: Annotated[int | None, BeforeValidator(minutes), Field(ge=1)] = None
    """The most minutes of a job; also in SLURM's notation, `2-00:00:00`."""
    max_mem_mb: PositiveInt | None = None
    """The most memory of a job on one node, in MB."""
    max_threads: PositiveInt | None = None
    """The most CPUs of a job on one node."""
    max_nodes: PositiveInt | None = None
    max_gpu: Annotated[int, Field(ge=0)] = 0
    """The most GPUs of a job, on all its nodes."""
    available_gpu_models: tuple[str, ...] | None = None
    """SLURM's names of its GPUs."""


class Site(Model):
    """A cluster, and what jobs use of it."""

    account: str | None = None
    """The account that jobs are charged to."""
    qos: str | None = None
    """The quality of service of all jobs."""
    constraint: str | None = None
    """Features of the nodes that jobs with GPUs run on, as for `sbatch --constraint`."""
    gpu_model: str | None = None
    """SLURM's name of the GPUs that jobs request; None for any."""
    gpus_by: Literal["gpus", "gres"] = "gpus"
    """How GPUs are requested: `--gpus=2`, or `--gres=gpu:2` on a cluster that supports only that."""
    status_command: Literal["sacct", "squeue"] = "squeue"
    """The command for the status of jobs; `sacct` if SLURM forgets jobs within minutes (MinJobAge)."""
    max_jobs: PositiveInt | None = None
    """The most jobs of this user in the queue; the profile takes it for `jobs`."""
    gpus_per_node: dict[str, PositiveInt] = {}
    """The number of GPUs per node, by partition."""
    partitions: Annotated[dict[str, Partition], Field(min_length=1)]


def site_file() -> Path | None:
    """The file that describes the cluster that jobs are sent to; None if there is none."""
    path = os.environ.get(VARIABLE)
    return Path(path) if path else None


def read_site(path: Path) -> Site:
    """Read a cluster's file; SnaketuneError if it is missing or invalid."""
    try:
        return Site.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise SnaketuneError(
            f"{path} ({VARIABLE}) doesn't exist; on the cluster, make slurm-profile writes profiles/slurm/cluster.yaml"
        ) from None
    except ValidationError as error:
        lines = "\n".join(f"  {_line(issue)}" for issue in error.errors())
        raise SnaketuneError(f"{path} is invalid:\n{lines}") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise SnaketuneError(f"{path} can't be read as YAML: {error}") from None


def _line(issue: Any) -> str:
    key = ".".join(map(str, issue["loc"])) or "(top level)"
    if issue["type"] == "extra_forbidden":
        return f"{key}: unknown key{unknown(str(issue['loc'][-1]), Site.model_fields)}"
    if issue["type"] == "missing":
        return f"{key}: missing; name at least one partition"
    return f"{key}: found {issue['input']!r}; {issue['msg']}"


@dataclass(frozen=True, kw_only=True)
class ResourceRequest:
    """The resources that one job requests: CPUs, memory and GPUs per node; the time in minutes."""

    threads: int
    mem_mb: int
    runtime: int
    gpus: int = 0
    nodes: int = 1


def fit_to_partitions(request: ResourceRequest, site: Site, key: str) -> ResourceRequest:
    """The request, cut to the limits of the partition that allows the most of it.

    Estimates (time, memory, threads) are cut: a training that takes longer resumes in a next job. What the config sets (GPUs,
    nodes) isn't.

    Args:
        key: the job's name for errors.
    Raises:
        SnaketuneError: the job could never start in any partition.

    >>> gpu = Partition(max_runtime=2880, max_gpu=2)
    >>> site = Site(partitions={"cpu": Partition(max_runtime=60, max_mem_mb=8000), "gpu": gpu})
    >>> fit_to_partitions(ResourceRequest(threads=8, mem_mb=16000, runtime=90), site, "corpus/chat")
    ResourceRequest(threads=8, mem_mb=8000, runtime=60, gpus=0, nodes=1)
    >>> fit_to_partitions(ResourceRequest(threads=8, mem_mb=16000, runtime=9000, gpus=1), site, "sft/chat")
    ResourceRequest(threads=8, mem_mb=16000, runtime=2880, gpus=1, nodes=1)
    """
    refusals = {name: list(_refusals(request, name, partition, site)) for name, partition in site.partitions.items()}
    fitting = [site.partitions[name] for name, reasons in refusals.items() if not reasons]
    if not fitting:
        asked = f"{request.gpus} GPUs on each of {request.nodes} nodes" if request.gpus else f"{request.nodes} nodes"
        if request.gpus and site.gpu_model:
            asked += f" of model {site.gpu_model}"
        refused = "; ".join(f"partition {name} {' and '.join(reasons)}" for name, reasons in refusals.items())
        raise SnaketuneError(
            f"{key} can never start: it requests {asked}, but {refused}; lower operation.gpus or operation.nodes, or add "
            "another partition to the cluster's file (profiles/slurm/cluster.yaml)"
        )
    # Partitions with GPUs are for jobs that need them, if there are others.
    suited = [one for one in fitting if bool(one.max_gpu) == bool(request.gpus)] or fitting
    cut = (
        replace(
            request,
            threads=min(request.threads, partition.max_threads or request.threads),
            mem_mb=min(request.mem_mb, partition.max_mem_mb or request.mem_mb),
            runtime=min(request.runtime, partition.max_runtime or request.runtime),
        )
        for partition in suited
    )
    return max(cut, key=lambda one: (one.runtime, one.mem_mb, one.threads))


def _refusals(request: ResourceRequest, name: str, partition: Partition, site: Site) -> Iterator[str]:
    if partition.max_nodes and request.nodes > partition.max_nodes:
        yield f"allows {partition.max_nodes} nodes"
    if not request.gpus:
        return
    most = site.gpus_per_node.get(name, partition.max_gpu)
    if request.gpus > most:
        yield f"has {most} GPUs on a node" if most else "has no GPUs"
    elif request.gpus * request.nodes > partition.max_gpu:
        yield f"allows {partition.max_gpu} GPUs"
    models = partition.available_gpu_models
    if most and site.gpu_model and models and site.gpu_model not in models:
        yield f"has GPUs of model {', '.join(models)}"


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
    """The content of the file, and the partitions that take no jobs of this user, each with the reason."""
    listed = run_slurm("scontrol", "--oneliner", "show", "partition")
    nodes = run_slurm("sinfo", "--noheader", "--exact", "--format=%R|%c|%m|%G")
    config = run_slurm("scontrol", "show", "config")
    if not (listed and nodes and config):
        raise SnaketuneError(
            "SLURM doesn't answer here (scontrol, sinfo); run this where sbatch works, or write the file yourself"
        )
    pairs = (line.partition("=") for line in config.splitlines() if "=" in line)
    about = {name.strip(): value.strip() for name, _, value in pairs}
    show_user = ("sacctmgr", "--noheader", "--parsable2", "show", "user", getpass.getuser(), "format=DefaultAccount")
    account = (run_slurm(*show_user) or "").strip()
    show_limits = ("sacctmgr", "--noheader", "--parsable2", "show", "assoc", f"user={getpass.getuser()}")
    limits = run_slurm(*show_limits, f"account={account}", "format=MaxSubmitJobs,GrpSubmitJobs") if account else ""
    max_jobs = _least(*map(_number, (limits or "").replace("|", " ").split()))
    partitions: dict[str, dict[str, Any]] = {}
    gpus_per_node: dict[str, int] = {}
    excluded: list[str] = []
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
    """The limits of a partition, as the executor plugin names them, and the most GPUs that one of its nodes has."""
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
    """The smallest of the sizes that are known; 0 if none is."""
    return min((size for size in sizes if size > 0), default=0)


def _number(text: str | None) -> int:
    return int(text) if text and text.isdecimal() else 0
