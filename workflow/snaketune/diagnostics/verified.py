"""The checks of finished trainings as text: what `snakemake verify` ends with, and what report and cards show."""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from snaketune.artifacts.manifest import Artifact, read_json
from snaketune.errors import SnaketuneError
from snaketune.stages.job import result_at
from snaketune.stages.job_files import job_file_of, read_job_file

FILE = "verify.json"
STATUSES = ("passed", "failed", "not checked")
# Inputs of the checks whose files aren't read again: a corpus may take hours.
DATA = {"corpus", "prompted", "pack", "evaluated"}
COLUMNS = ("status", "check", "figure", "expected", "compared")


def checks_in(result: Artifact) -> list[dict[str, Any]]:
    """The checks of a training, in order: the attributes of `checks.check.Check`."""
    return json.loads(result.file(FILE).read_text(encoding="utf-8"))["checks"]


def print_verified(manifests: Iterable[Path]) -> int:
    """Print the checks of each training, the time that they took, and files that have changed since; return the exit status, 1
    if a check failed or a file changed."""
    failed, intact = 0, set[Path]()
    for manifest in manifests:
        result = result_at(manifest)
        checks = checks_in(result)
        seconds = read_json(manifest.with_name("run.json"), {}).get("seconds")
        print(
            f"{manifest.parent.name}{f', checked in {seconds:.0f} s' if seconds else ''}", as_text(checks), "", sep="\n"
        )
        failed += sum(check["status"] == "failed" for check in checks)
        for checked in _checked_results(result):
            if checked not in intact:
                try:
                    result_at(checked).files()
                    intact.add(checked)
                except SnaketuneError as error:
                    print(f"! {error}", "", sep="\n")
                    failed += 1
    print(f"{failed} checks failed" if failed else "no check failed", flush=True)
    return int(failed > 0)


def _checked_results(result: Artifact) -> Iterator[Path]:
    """The manifests of the models, scores and log-probabilities that the checks are of, by the job file of the checks."""
    job_file = job_file_of(result.manifest["stage"], result.manifest_path.parent.name)
    if job_file.is_file():
        for role, inputs in read_job_file(job_file).inputs.items():
            if role not in DATA:
                yield from (path for path in map(Path, inputs) if path.name == "manifest.json")


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
