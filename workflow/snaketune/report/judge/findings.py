"""Findings: problems in results, grouped, and the next steps, which are an action and the config key to edit."""

from dataclasses import dataclass

WARNS, NOTES = "warns", "notes"
# Number of runs that a group names.
NAMED = 3


@dataclass(frozen=True, kw_only=True)
class ReportFinding:
    """A problem, where it is, and what to do about it.

    Attributes:
        kind: After a colon, what distinguishes findings of a kind. Those of one kind and key are grouped.
        where: A run, a pack, a corpus or an evaluation.
        key: The config key to edit.
        action: What to do with that key.
        gain: The share of the data, the time or the score that is lost, from the figures of the run; 1 if that isn't known, as
            of a run that failed.
    """

    kind: str
    where: str
    message: str
    action: str = ""
    key: str = ""
    severity: str = WARNS
    gain: float = 1.0


@dataclass(frozen=True, kw_only=True)
class FindingGroup:
    """The same finding in one or more runs, with the message of the first; `unnamed` runs aren't named."""

    where: list[str]
    first: ReportFinding

    @property
    def unnamed(self) -> int:
        return max(0, len(self.where) - NAMED)


@dataclass(frozen=True, kw_only=True)
class Step:
    """An action, the config key to edit, and the kinds of the findings that suggest it."""

    action: str
    key: str
    reasons: list[str]


def groups(findings: list[ReportFinding]) -> list[FindingGroup]:
    """Group findings by kind and key, in order of first appearance. A finding without a key isn't grouped."""
    grouped: dict[tuple[str, ...], list[ReportFinding]] = {}
    for finding in findings:
        grouped.setdefault(
            (finding.kind, finding.key) if finding.key else (finding.kind, finding.where, finding.message), []
        ).append(finding)
    return [
        FindingGroup(where=list(dict.fromkeys(finding.where for finding in alike)), first=alike[0])
        for alike in grouped.values()
    ]


def steps(findings: list[ReportFinding]) -> list[Step]:
    """The actions of all findings without repetitions, in their order; of several for one key, the first."""
    grouped: dict[str, Step] = {}
    for finding in findings:
        if finding.action:
            step = grouped.setdefault(
                finding.key or finding.action, Step(action=finding.action, key=finding.key, reasons=[])
            )
            kind = finding.kind.partition(":")[0]
            if kind not in step.reasons:
                step.reasons.append(kind)
    return list(grouped.values())
