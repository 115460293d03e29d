"""What was found before the first training, as its run.json repeats it: shown beside what the results say of themselves."""

from typing import Any

from snaketune.errors import SnaketuneError
from snaketune.report.data.results import ResultSet
from snaketune.report.judge.rules import NOTES, WARNS, ReportFinding
from snaketune.report.text import clip

# What stops a run is a warning by the time that there is a report of it.
SEVERITIES = {"stops": WARNS, "warns": WARNS, "notes": NOTES}


def preflight_findings(results: ResultSet) -> list[ReportFinding]:
    """Of all trainings; nothing where nobody looked. Raises SnaketuneError if it isn't as `preflight` writes it."""
    found: list[ReportFinding] = []
    for result in results.of("sft", "dpo"):
        try:
            found += parse_findings(result.run.get("preflight") or [])
        except (LookupError, TypeError, AttributeError) as error:
            raise SnaketuneError(
                f"results/{result.stage}/{result.name}/run.json: what preflight found isn't as it writes it ({error!r}); "
                "remove the file's folder and run again"
            ) from None
    # Runs that were looked at together repeat it.
    return list(dict.fromkeys(found))


def parse_findings(entries: list[dict[str, Any]]) -> list[ReportFinding]:
    """
    >>> one = {"severity": "warns", "where": "sft.a", "key": "sft.a.seed", "found": "twice", "do": "another"}
    >>> [(one.where, one.found, one.do, one.key) for one in told([one, one | {"severity": "fine"}])]
    [('sft.a', 'twice', 'another', 'sft.a.seed')]
    """
    return [
        ReportFinding(
            kind=f"preflight: {clip(one['found'], 200)}",
            where=clip(one["where"], 200),
            found=clip(one["found"]),
            do=clip(one.get("do") or ""),
            key=clip(one.get("key") or "", 200),
            severity=SEVERITIES[one["severity"]],
        )
        for one in entries
        if one["severity"] in SEVERITIES
    ]
