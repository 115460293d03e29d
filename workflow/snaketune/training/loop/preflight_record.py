"""What `preflight` found and let pass, for run.json: the report tells it beside what came of it."""

import json
from pathlib import Path
from typing import Any

from snaketune.config.operation import Execution
from snaketune.errors import SnaketuneError
from snaketune.stages.job import result_at

FINDINGS = "findings.json"


def findings_before(operation: Execution) -> list[dict[str, Any]]:
    """Of this run and of those that it was looked at together with; nothing where nobody looked, or it can't be read."""
    manifest = Path(operation.preflight)
    if not operation.preflight or not manifest.is_file():
        return []
    try:
        return json.loads(result_at(manifest).file(FINDINGS).read_text(encoding="utf-8"))["findings"]
    except (SnaketuneError, OSError, ValueError, LookupError) as error:
        # It only tells, and nothing fails for want of it.
        print(f"note: what preflight found can't be read ({error})", flush=True)
        return []
