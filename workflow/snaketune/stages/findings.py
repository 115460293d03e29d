"""Findings: problems that are reported before anything is loaded."""

from collections.abc import Iterable
from dataclasses import dataclass

from snaketune.errors import SnaketuneError


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
    """Print the findings that aren't certain, and raise SnaketuneError with all that are.

    Args:
        log: whether this process prints; of several worker processes one does.
    """
    every = list(findings)
    for finding in every if log else ():
        if not finding.certain:
            print(f"note: {finding}", flush=True)
    if certain := [str(finding) for finding in every if finding.certain]:
        raise SnaketuneError("\n       ".join(certain))
