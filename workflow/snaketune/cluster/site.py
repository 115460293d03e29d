"""What a user's cluster gives and what jobs are charged to: the few lines that its user edits once.

They stand in the file that the environment variable SNAKEMAKE_SLURM_PARTITIONS names, which is that of the SLURM executor
plugin: it reads `partitions` there to choose one for each job, and snaketune keeps what jobs ask for below the same limits. The
profile profiles/slurm names `cluster.yaml` beside it, and `make slurm-profile` writes that. Nothing on a command line replaces
any of it, as it replaces whole blocks of a profile.
"""

import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BeforeValidator, ConfigDict, Field, ValidationError

from snaketune.config.base import Model, PositiveInt
from snaketune.config.suggestions import unknown
from snaketune.errors import SnaketuneError

VARIABLE = "SNAKEMAKE_SLURM_PARTITIONS"
CLOCK = re.compile(r"(?:(?P<days>\d+)-)?(?P<first>\d+)(?::(?P<second>\d+))?(?::(?P<third>\d+))?")


def minutes(told: Any) -> Any:
    """As SLURM writes times, in whole minutes.

    >>> minutes(90), minutes("1-12:00:00"), minutes("12:30:59"), minutes("45")
    (90, 2160, 750, 45)
    """
    if not isinstance(told, str) or not (found := CLOCK.fullmatch(told.strip())):
        return told
    days, first, second = (int(found[name] or 0) for name in ("days", "first", "second"))
    if found["days"] is not None or found["third"] is not None:
        return (days * 24 + first) * 60 + second
    # Minutes, or minutes and seconds.
    return first


class Partition(Model):
    """Limits of one partition, as the executor plugin names them; what isn't given has none. Its other keys are its own."""

    model_config = ConfigDict(extra="ignore")

    max_runtime: Annotated[int | None, BeforeValidator(minutes), Field(ge=1)] = None
    """Minutes that a job may take; or as SLURM writes it, `2-00:00:00`."""
    max_mem_mb: PositiveInt | None = None
    """Megabytes of a job on one node."""
    max_threads: PositiveInt | None = None
    """CPUs of a job on one node."""
    max_nodes: PositiveInt | None = None
    """Nodes of a job."""
    max_gpu: Annotated[int, Field(ge=0)] = 0
    """GPUs of a job, on all its nodes."""
    available_gpu_models: tuple[str, ...] | None = None
    """What SLURM calls its GPUs."""


class Site(Model):
    """A cluster, as snaketune may use it."""

    account: str | None = None
    """What jobs are charged to."""
    qos: str | None = None
    """Quality of service of all jobs."""
    constraint: str | None = None
    """Features of the nodes that jobs with GPUs run on, as for `sbatch --constraint`."""
    gpu_model: str | None = None
    """The GPUs that jobs ask for, as SLURM calls them; none for any."""
    gpus_by: Literal["gpus", "gres"] = "gpus"
    """How they are asked for: `--gpus=2`, or `--gres=gpu:2` where a cluster knows only that."""
    status_command: Literal["sacct", "squeue"] = "squeue"
    """What tells how jobs are doing; `sacct` where SLURM forgets jobs within minutes (MinJobAge)."""
    gpus_per_node: dict[str, PositiveInt] = {}
    """By partition, how many GPUs its nodes have."""
    partitions: Annotated[dict[str, Partition], Field(min_length=1)]
    """By name."""


def site_file() -> Path | None:
    """The file that describes the cluster that jobs are sent to; None where they aren't sent to one that is described."""
    told = os.environ.get(VARIABLE)
    return Path(told) if told else None


def read_site(path: Path) -> Site:
    """Raises SnaketuneError if it isn't there, or isn't as it has to be."""
    try:
        told = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SnaketuneError(
            f"{path} ({VARIABLE}) isn't there; where SLURM is, make slurm-profile writes profiles/slurm/cluster.yaml"
        ) from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise SnaketuneError(f"{path}: it can't be read as YAML: {error}") from None
    try:
        return Site.model_validate(told)
    except ValidationError as error:
        lines = [_line(issue) for issue in error.errors()]
        raise SnaketuneError(f"{path} is wrong:\n" + "\n".join(f"  {line}" for line in lines)) from None


def _line(issue: Any) -> str:
    key = ".".join(map(str, issue["loc"])) or "(top level)"
    if issue["type"] == "extra_forbidden":
        return f"{key}: unknown key{unknown(str(issue['loc'][-1]), Site.model_fields)}"
    if issue["type"] == "missing":
        return f"{key}: it is missing; at least one partition has to be named"
    return f"{key}: found {issue['input']!r}; {issue['msg']}"
