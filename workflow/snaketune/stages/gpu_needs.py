"""What is found wrong before anything is loaded, and what of a run needs a GPU, told by its spec and its operation alone.

No torch is imported: a job without a GPU is refused before its processes start.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from snaketune.config.operation import Operation
from snaketune.config.optimizers import OPTIMIZERS
from snaketune.errors import SnaketuneError

ALLOW = "operation.allow_cpu: true"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something that a training will fail at, or may.

    Attributes:
        key: of the config, that can be edited.
        problem, do: what is the matter, and what to do about it.
        certain: else it is a note, and the training goes on.
    """

    key: str
    problem: str
    do: str
    certain: bool = True

    def __str__(self) -> str:
        return f"{self.key}: {self.problem}; {self.do}"


def report_findings(findings: Iterable[Finding], log: bool = True) -> None:
    """Print those that aren't certain.

    Args:
        log: whether to print; of several processes one does.
    Raises:
        SnaketuneError: with all that are.
    """
    found = list(findings)
    for finding in found if log else ():
        if not finding.certain:
            print(f"note: {finding}", flush=True)
    if certain := [str(finding) for finding in found if finding.certain]:
        raise SnaketuneError("\n       ".join(certain))


def gpu_findings(spec: Any, operation: Operation) -> list[Finding]:
    """What needs a GPU, for a job that has none, unless the CPU is allowed.

    Args:
        spec: of a stage that computes on one.

    >>> print(*gpu_findings(None, Operation(gpus=2)))  # doctest: +NORMALIZE_WHITESPACE
    operation.gpus: asks for 2 GPUs, and this job has none; run it on a machine with GPUs, set gpus: 1, or train in 2 processes
        on the CPU by operation.allow_cpu: true
    """
    if operation.allow_cpu:
        return []
    # Of a calibration: the run that it is for.
    run = getattr(spec, "run", spec)
    training = getattr(run, "training", None)
    found = []
    if getattr(run, "quantization", None):
        found.append(
            Finding(
                key="quantization",
                found="4-bit weights are there to fit a GPU, and this job has none",
                do=f"run it on a machine with one, take quantization out, or compute them on the CPU, slowly, by {ALLOW}",
            )
        )
    if training and OPTIMIZERS[training.optimizer].for_gpus:
        found.append(
            Finding(
                key="training.optimizer",
                found=f"{training.optimizer} is there to fit a GPU, and this job has none",
                do=f"run it on a machine with one, take adamw_torch_fused, or keep it on the CPU by {ALLOW}",
            )
        )
    for key, count, one in (("gpus", operation.gpus, "GPUs"), ("nodes", operation.nodes, "nodes with GPUs")):
        if count > 1:
            found.append(
                Finding(
                    key=f"operation.{key}",
                    found=f"asks for {count} {one}, and this job has none",
                    do=f"run it on a machine with GPUs, set {key}: 1, or train in {operation.processes} processes on the CPU "
                    f"by {ALLOW}",
                )
            )
    return found
