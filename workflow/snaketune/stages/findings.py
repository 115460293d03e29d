"""Findings: problems that are reported before anything is loaded; and the findings of jobs that need a GPU.

torch isn't imported, so a job without a GPU is refused before its processes start.
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
    """A problem that a training will fail at, or may fail at.

    Attributes:
        key: the config key to edit.
        problem, do: what is wrong, and what to do about it.
        certain: whether the training is certain to fail; otherwise the finding is printed as a note and the training continues.
    """

    key: str
    problem: str
    do: str
    certain: bool = True

    def __str__(self) -> str:
        return f"{self.key}: {self.problem}; {self.do}"


def report_findings(findings: Iterable[Finding], log: bool = True) -> None:
    """Print the findings that aren't certain, and raise if any is certain.

    Args:
        log: whether this process prints; of several worker processes one does.
    Raises:
        SnaketuneError: with all certain findings.
    """
    every = list(findings)
    for finding in every if log else ():
        if not finding.certain:
            print(f"note: {finding}", flush=True)
    if certain := [str(finding) for finding in every if finding.certain]:
        raise SnaketuneError("\n       ".join(certain))


def gpu_findings(spec: Any, operation: Operation) -> list[Finding]:
    """Return what needs a GPU, for a job that has none; empty if the config allows the CPU.

    Args:
        spec: of a stage that claims GPUs.

    >>> print(*gpu_findings(None, Operation(gpus=2)))  # doctest: +NORMALIZE_WHITESPACE
    operation.gpus: 2 GPUs are configured, and this job has none; run it on a machine with GPUs, set gpus: 1, or train in 2
        processes on the CPU by operation.allow_cpu: true
    """
    if operation.allow_cpu:
        return []
    # A calibration has the spec of the run that it measures in its own.
    run = getattr(spec, "run", spec)
    training = getattr(run, "training", None)
    findings = []
    if getattr(run, "quantization", None):
        findings.append(
            Finding(
                key="quantization",
                problem="4-bit weights are used to fit a GPU, and this job has none",
                do=f"run it on a machine with one, remove quantization, or compute them on the CPU, slowly, by {ALLOW}",
            )
        )
    if training and OPTIMIZERS[training.optimizer].for_gpus:
        findings.append(
            Finding(
                key="training.optimizer",
                problem=f"{training.optimizer} is used to fit a GPU, and this job has none",
                do=f"run it on a machine with one, set adamw_torch_fused, or keep it on the CPU by {ALLOW}",
            )
        )
    for key, count, one in (("gpus", operation.gpus, "GPUs"), ("nodes", operation.nodes, "nodes with GPUs")):
        if count > 1:
            findings.append(
                Finding(
                    key=f"operation.{key}",
                    problem=f"{count} {one} are configured, and this job has none",
                    do=f"run it on a machine with GPUs, set {key}: 1, or train in {operation.processes} processes on the CPU "
                    f"by {ALLOW}",
                )
            )
    return findings
