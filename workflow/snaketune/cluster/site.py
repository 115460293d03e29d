"""The description of a user's cluster: accounts, limits and GPUs, in a file that the user edits once.

The environment variable SNAKEMAKE_SLURM_PARTITIONS names the file, as for the SLURM executor plugin, which chooses a partition
for each job by its `partitions`; snaketune cuts requests to the same limits. The profile profiles/slurm uses `cluster.yaml`
beside it, which `make slurm-profile` writes. No command-line option replaces any of it, as one does with whole blocks of a
profile.
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


def minutes(value: Any) -> Any:
    """Convert a time in SLURM's notation to whole minutes; other values are returned as they are.

    >>> minutes(90), minutes("1-12:00:00"), minutes("12:30:59"), minutes("45")
    (90, 2160, 750, 45)
    """
    if not isinstance(value, str) or not (match := CLOCK.fullmatch(value.strip())):
        return value
    days, first, second = (int(match[name] or 0) for name in ("days", "first", "second"))
    if match["days"] is not None or match["third"] is not None:
        return (days * 24 + first) * 60 + second
    # Minutes, or minutes and seconds.
    return first


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
    """The most nodes of a job."""
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
    gpus_per_node: dict[str, PositiveInt] = {}
    """The number of GPUs per node, by partition."""
    partitions: Annotated[dict[str, Partition], Field(min_length=1)]
    """The partitions by name."""


def site_file() -> Path | None:
    """Return the file that describes the cluster that jobs are sent to; None if there is none."""
    path = os.environ.get(VARIABLE)
    return Path(path) if path else None


def read_site(path: Path) -> Site:
    """Read a cluster's file; SnaketuneError if it is missing or invalid."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SnaketuneError(
            f"{path} ({VARIABLE}) doesn't exist; on the cluster, make slurm-profile writes profiles/slurm/cluster.yaml"
        ) from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise SnaketuneError(f"{path} can't be read as YAML: {error}") from None
    try:
        return Site.model_validate(content)
    except ValidationError as error:
        lines = [_line(issue) for issue in error.errors()]
        raise SnaketuneError(f"{path} is invalid:\n" + "\n".join(f"  {line}" for line in lines)) from None


def _line(issue: Any) -> str:
    key = ".".join(map(str, issue["loc"])) or "(top level)"
    if issue["type"] == "extra_forbidden":
        return f"{key}: unknown key{unknown(str(issue['loc'][-1]), Site.model_fields)}"
    if issue["type"] == "missing":
        return f"{key}: missing; name at least one partition"
    return f"{key}: found {issue['input']!r}; {issue['msg']}"
