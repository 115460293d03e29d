"""What Snakemake's SLURM executor will do with a job: the account that it refuses, the partition that it chooses."""

import logging
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from snakemake.exceptions import WorkflowError
from snakemake_executor_plugin_slurm.accounts import validate_account
from snakemake_executor_plugin_slurm.partitions import get_best_partition, read_partition_file

from snaketune.errors import SnaketuneError


def check_account(account: str, file: Path, log: logging.Logger) -> None:
    """Raise SnaketuneError if the executor would refuse the account: while it submits a group, that makes it wait forever.

    Args:
        file: the cluster's file, which names the account.
    """
    try:
        validate_account(account, log)
    except WorkflowError as error:
        raise SnaketuneError(f"{' '.join(str(error).split())}; correct `account` in {file}") from None


class Partitions:
    """The partitions of a cluster's file."""

    def __init__(self, file: Path):
        self._partitions = read_partition_file(file)

    def best(self, name: str, threads: int, resources: Mapping[str, Any]) -> str | None:
        """Return the partition that the executor chooses for a job, or for a group by the sums of its jobs."""
        job: Any = SimpleNamespace(name=name, threads=threads, resources=resources)
        return get_best_partition(self._partitions, job, logging.Logger("unused"))  # type: ignore[arg-type]
