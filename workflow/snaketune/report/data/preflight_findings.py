"""Findings of `preflight`, which the run.json of each training repeats."""

from typing import Any

from snaketune.errors import SnaketuneError
from snaketune.report.data.results import ResultSet
from snaketune.report.judge.rules import NOTES, WARNS, ReportFinding
from snaketune.report.text import clip

# A finding that stops a run is a warning here, since the run was started anyway.
SEVERITIES = {"stops": WARNS, "warns": WARNS, "notes": NOTES}


def preflight_findings(results: ResultSet) -> list[ReportFinding]:
    """The findings of all trainings; empty without preflight. Raises SnaketuneError for entries of another form."""
    findings: list[ReportFinding] = []
    for result in results.of("sft", "dpo"):
        try:
            findings += parse_findings(result.run.get("preflight") or [])
        except (LookupError, TypeError, AttributeError) as error:
            raise SnaketuneError(
                f"results/{result.stage}/{result.name}/run.json: the entry `preflight` isn't in the form that preflight writes "
                f"({error!r}); remove the file's folder and run again"
            ) from None
    # Runs that preflight checked together have the same findings.
    return list(dict.fromkeys(findings))


def parse_findings(entries: list[dict[str, Any]]) -> list[ReportFinding]:
    """The findings among preflight's entries, without passed checks.

    >>> one = {"severity": "warns", "where": "sft.a", "key": "sft.a.seed", "found": "twice", "do": "another"}
    >>> [(one.where, one.message, one.action, one.key) for one in parse_findings([one, one | {"severity": "fine"}])]
    [('sft.a', 'twice', 'another', 'sft.a.seed')]
    """
    return [
        ReportFinding(
            kind=f"preflight: {clip(one['found'], 200)}",
            where=clip(one["where"], 200),
            message=clip(one["found"]),
            action=clip(one.get("do") or ""),
            key=clip(one.get("key") or "", 200),
            severity=SEVERITIES[one["severity"]],
        )
        for one in entries
        if one["severity"] in SEVERITIES
    ]
