"""The checks of finished trainings as text: what `snakemake verify` ends with, and what report and cards show."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from snaketune.artifacts.manifest import Artifact

FILE = "verify.json"
STATUSES = ("passed", "failed", "not checked")
COLUMNS = ("status", "check", "figure", "expected", "compared")


def checks_in(result: Artifact) -> list[dict[str, Any]]:
    """The checks of a training, in order: the attributes of `checks.check.Check`."""
    return json.loads(result.file(FILE).read_text(encoding="utf-8"))["checks"]


def table(checks: Iterable[dict[str, Any]]) -> list[list[str]]:
    """COLUMNS of each check, as text. Args: checks: as in verify.json."""
    return [
        [
            check["status"],
            check["name"],
            _number(check["figure"]),
            "" if check["tolerance"] is None else f"{'≥' if check['at_least'] else '≤'} {_number(check['tolerance'])}",
            "; ".join(filter(None, (check["compares"], check["reason"]))),
        ]
        for check in checks
    ]


def counts_of(checks: Sequence[dict[str, Any]]) -> dict[str, int]:
    """How many checks passed and failed, and weren't made."""
    return {status: sum(check["status"] == status for check in checks) for status in STATUSES}


def as_text(checks: Sequence[dict[str, Any]]) -> str:
    """A line for each check, with columns of equal width; failed ones are marked."""
    rows = [list(COLUMNS), *table(checks)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS) - 1)]
    lines = ["  ".join([*(cell.ljust(width) for cell, width in zip(row, widths)), row[-1]]) for row in rows]
    return "\n".join(("! " if row[0] == "failed" else "  ") + line for row, line in zip(rows, lines))


def _number(value: float | None) -> str:
    """
    >>> _number(0.0), _number(1e-3), _number(0.93751), _number(3.14159e-6), _number(None)
    ('0', '0.001', '0.9375', '3.1e-06', '')
    """
    if value is None:
        return ""
    return f"{value:.4g}" if value == 0 or abs(value) >= 1e-3 else f"{value:.1e}"
