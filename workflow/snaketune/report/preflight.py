"""What was found before the first training, as the stage `preflight` left it: shown beside what the results say of themselves.

findings.json: {"findings": [{"severity": "warns", "where": "sft.demo", "key": "sft.demo.training.learning_rate",
                              "found": "...", "do": "..."}]}
"""

import json
from typing import Any

from snaketune.errors import SnaketuneError
from snaketune.report.findings import Findings
from snaketune.report.rules import NOTES, WARNS, Suspicion
from snaketune.report.text import clip

STAGE, FILE = "preflight", "findings.json"
# What stops a run is a warning by the time that there is a report of it.
SEVERITIES = {"stops": WARNS, "warns": WARNS, "notes": NOTES}


def found_before(findings: Findings) -> list[Suspicion]:
    """Of all runs that were looked at; nothing where none was. Raises SnaketuneError if a file isn't as the stage writes it."""
    found = []
    for result in findings.of(STAGE):
        path = result.artifact.file(FILE)
        try:
            found += told(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise SnaketuneError(f"{path} isn't as {STAGE} writes it ({error!r}); remove it and run again") from None
    return found


def told(content: dict[str, Any]) -> list[Suspicion]:
    """
    >>> one = {"severity": "warns", "where": "sft.a", "key": "sft.a.seed", "found": "twice", "do": "another"}
    >>> [(one.where, one.found, one.do, one.key) for one in told({"findings": [one, one | {"severity": "fine"}]})]
    [('sft.a', 'twice', 'another', 'sft.a.seed')]
    """
    return [
        Suspicion(
            kind=f"{STAGE}: {clip(one['found'], 200)}",
            where=clip(one["where"], 200),
            found=clip(one["found"]),
            do=clip(one.get("do") or ""),
            key=clip(one.get("key") or "", 200),
            severity=SEVERITIES[one["severity"]],
        )
        for one in content["findings"]
        if one["severity"] in SEVERITIES
    ]
