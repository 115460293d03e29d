"""What a run prints besides the lines of its jobs: less of Snakemake's log, and at the end what was made."""

import logging
from collections.abc import Iterable
from pathlib import Path

from snakemake_interface_logger_plugins.common import LogEvent

from snaketune.artifacts.manifest import read_json
from snaketune.config.generation import Server
from snaketune.stages.job import RESULTS, Job


def is_news(record: logging.LogRecord) -> bool:
    """A filter of Snakemake's log that drops what the line of a job, what the job prints, and the count of steps say too."""
    repeated = getattr(record, "event", None) in (LogEvent.JOB_STARTED, LogEvent.JOB_FINISHED)
    return not repeated and record.msg != "Select jobs to execute..."


def leaving_lines(jobs: Iterable[Job]) -> list[str]:
    """For each server that the config names, which jobs send it what they read."""
    sending: dict[str, list[str]] = {}
    for job in jobs:
        if isinstance(job.operation.engine, Server):
            sending.setdefault(job.operation.engine.url, []).append(f"{job.stage}/{job.name}")
    return [
        f"Sent to {url}, out of this workflow: prompts and responses of {', '.join(names)}."
        for url, names in sending.items()
    ]


def ending_lines(report: Job, chat: Path) -> list[str]:
    """The last lines of a run: the verdict, scores side by side, and where the report and the model are.

    Args:
        chat: the script that asks a model, from the working directory.
    """
    recorded = read_json(report.manifest, {}).get("ending") or {}
    scores = recorded.get("scores") or []
    widths = [max(map(len, column)) for column in zip(*scores)]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in scores[1:] and scores]
    lines = [*(recorded.get("verdict") or []), *table, f"report  {report.payload}/index.html"]
    if model := recorded.get("model"):
        lines += [f"model   {RESULTS / model}", f"chat    python {chat} {RESULTS / model} 'Hello'"]
    return lines
