"""Results of a benchmark: figures beside their goals, details, and a Markdown table."""

import json
import os
import platform
import shlex
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

# By key: whether to be as large or as small, and what it is to reach.
Goals = dict[str, tuple[str, float]]


def made_on(module: str) -> dict[str, Any]:
    """Return machine, date, versions and command."""
    return {
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("torch", "transformers", "trl", "datasets", "tokenizers")},
        "date": time.strftime("%Y-%m-%d"),
        "command": shlex.join(["python", "-m", module, *sys.argv[1:]]),
    }


def read_details(path: Path) -> dict[str, Any]:
    """Read the details of earlier runs of some parts."""
    return json.loads(path.read_text(encoding="utf-8"))["details"] if path.is_file() else {}


def figures(details: dict[str, Any], goals: Goals) -> dict[str, float]:
    """Return the figures that were measured."""
    found = {key: value for part in details.values() for key, value in part.items()}
    return {key: found[key] for key in goals if key in found}


def write(path: Path, details: dict[str, Any], goals: Goals) -> None:
    """Write the figures, their goals and details."""
    path.parent.mkdir(parents=True, exist_ok=True)
    wanted = {key: " ".join(map(str, goal)) for key, goal in goals.items()}
    text = json.dumps(figures(details, goals) | {"goals": wanted, "details": details}, indent=2)
    partial = path.with_suffix(".partial")
    partial.write_text(text + "\n", encoding="utf-8")
    partial.replace(path)


def table(details: dict[str, Any], goals: Goals) -> str:
    """Return the table for docs/benchmarks.md."""
    found = figures(details, goals)
    lines = ["| key | measured | goal |", "|---|---|---|"]
    for key, (how, goal) in goals.items():
        lines.append(f"| `{key}` | {f'{found[key]:.3g}' if key in found else 'not measured'} | {how} {goal:g} |")
    return "\n".join(lines)


def keep_table(document: Path, name: str, text: str) -> None:
    """Write a table into a document, between `<!-- name -->` and `<!-- /name -->`.

    Raises:
        ValueError: the document has no such markers.
    """
    begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
    before, found, rest = document.read_text(encoding="utf-8").partition(begin)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise ValueError(f"{document} has no markers for the table {name}")
    document.write_text(f"{before}{begin}\n{text}\n\n{end}{after}", encoding="utf-8")
