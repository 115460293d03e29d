"""Findings of `preflight` that didn't stop the run, for run.json: the report shows them beside the result."""

import json
from pathlib import Path
from typing import Any

from snaketune.config.operation import Execution
from snaketune.errors import SnaketuneError
from snaketune.stages.job import result_at

FINDINGS = "findings.json"


def read_preflight_findings(operation: Execution) -> list[dict[str, Any]]:
    """Findings on this run and on the runs that were checked with it; [] without a preflight, or if it can't be read."""
    manifest = Path(operation.preflight)
    if not operation.preflight or not manifest.is_file():
        return []
    try:
        return json.loads(result_at(manifest).file(FINDINGS).read_text(encoding="utf-8"))["findings"]
    except (SnaketuneError, OSError, ValueError, LookupError) as error:
        # Findings only inform; no training fails because they are missing.
        print(f"note: the findings of preflight can't be read ({error})", flush=True)
        return []
