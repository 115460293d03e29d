"""The last lines of a run: the verdict, scores side by side, and where the report and the model are."""

from pathlib import Path

from snaketune.artifacts.manifest import read_json
from snaketune.stages.job import RESULTS, Job


def ending_lines(report: Job, chat: Path) -> list[str]:
    """The lines to print after a report. Args: chat: the script that asks a model, from the working directory."""
    recorded = read_json(report.manifest, {}).get("ending") or {}
    scores = recorded.get("scores") or []
    widths = [max(map(len, column)) for column in zip(*scores)]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in scores[1:] and scores]
    lines = [*(recorded.get("verdict") or []), *table, f"report  {report.payload}/index.html"]
    if model := recorded.get("model"):
        lines += [f"model   {RESULTS / model}", f"chat    python {chat} {RESULTS / model} 'Hello'"]
    return lines
