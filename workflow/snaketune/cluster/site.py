"""The description of a user's cluster: accounts, limits and GPUs, in a file that the user edits once; and what fits its limits.

The environment variable SNAKEMAKE_SLURM_PARTITIONS names the file, as for the SLURM executor plugin, which chooses a partition
for each job by its `partitions`; snaketune cuts requests to the same limits. The profile profiles/slurm uses `cluster.yaml`
beside it, which the plugin's own command writes (`make slurm-profile`). No command-line option replaces any of it, as one does
with whole blocks of a profile.
"""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BeforeValidator, ConfigDict, Field, ValidationError

from snaketune.config.base import Model, PositiveInt
from snaketune.config.invalid_values import lines_of
from snaketune.errors import SnaketuneError

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

    # The most minutes of a job; also in SLURM's notation, `2-00:00:00`.
    max_runtime: Annotated[int | None, BeforeValidator(minutes), Field(ge=1)] = None
    max_mem_mb: PositiveInt | None = None  # the most memory of a job on one node, in MB
    max_threads: PositiveInt | None = None  # the most CPUs of a job on one node
    max_nodes: PositiveInt | None = None
    max_gpu: Annotated[int, Field(ge=0)] = 0  # the most GPUs of a job, on all its nodes
    available_gpu_models: tuple[str, ...] | None = None  # SLURM's names of its GPUs


class Site(Model):
    """A cluster, and what jobs use of it."""

    account: str | None = None  # the account that jobs are charged to
    qos: str | None = None  # the quality of service of all jobs
    constraint: str | None = None  # features of the nodes that jobs with GPUs run on, as for `sbatch --constraint`
    gpu_model: str | None = None  # SLURM's name of the GPUs that jobs request; None for any
    # How GPUs are requested: `--gpus=2`, or `--gres=gpu:2` on a cluster that supports only that.
    gpus_by: Literal["gpus", "gres"] = "gpus"
    # The command for the status of jobs; `sacct` if SLURM forgets jobs within minutes (MinJobAge).
    status_command: Literal["sacct", "squeue"] = "squeue"
    max_jobs: PositiveInt | None = None  # the most jobs of this user in the queue; the profile takes it for `jobs`
    gpus_per_node: dict[str, PositiveInt] = {}  # the number of GPUs per node, by partition
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
        lines = "\n".join(f"  {line}" for line in lines_of(error, Site))
        raise SnaketuneError(f"{path} is invalid:\n{lines}") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise SnaketuneError(f"{path} can't be read as YAML: {error}") from None


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
    suited = [partition for partition in fitting if bool(partition.max_gpu) == bool(request.gpus)] or fitting
    cut = (
        replace(
            request,
            threads=min(request.threads, partition.max_threads or request.threads),
            mem_mb=min(request.mem_mb, partition.max_mem_mb or request.mem_mb),
            runtime=min(request.runtime, partition.max_runtime or request.runtime),
        )
        for partition in suited
    )
    return max(cut, key=lambda candidate: (candidate.runtime, candidate.mem_mb, candidate.threads))


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
