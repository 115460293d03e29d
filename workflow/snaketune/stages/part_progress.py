"""Progress over all parts of a stage's work, each of which is a job of its own: printed by each part when it is made."""

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from snaketune.artifacts.manifest import read_json
from snaketune.stages.job_files import job_file_of

TIME = "%Y-%m-%dT%H:%M:%SZ"


class _Made(NamedTuple):
    """A part that is current; `run` is its run.json."""

    name: str
    run: dict[str, Any]

    @property
    def start(self) -> float:
        return datetime.strptime(self.run["started"], TIME).replace(tzinfo=UTC).timestamp()

    @property
    def end(self) -> float:
        return self.start + self.run["attempts"][-1]


def part_progress(stage: str, out: Path) -> str | None:
    """A line about the parts made so far, with rate and remaining time; None if there is one part.

    Parts made before this plan count as made, but not in rate and times.

    Args:
        out: the folder of a part, such as `results/read/chat/2-of-8`.
    """
    _, _, count = out.name.partition("-of-")
    if not count.isdecimal() or int(count) < 2:
        return None
    parts, made = int(count), list(_made(stage, out, int(count)))
    line = f"{stage}: {len(made)} of {parts} parts of {out.parent.name} are made"
    timed = [part for part in made if part.start >= _planned(stage, out.parent.name, part.name)]
    if not timed:
        return line
    seconds = max(1.0, max(part.end for part in timed) - min(part.start for part in timed))
    read = sum(part.run.get("bytes_read", 0) for part in timed), sum(part.run.get("rows_read", 0) for part in timed)
    if all(read):
        line += f", {read[0] / 1e6 / seconds:,.1f} MB/s, {read[1] / seconds:,.0f} rows/s"
    if left := parts - len(made):
        return f"{line}, {left * seconds / len(timed):,.0f} s left"
    slowest = max(timed, key=lambda part: part.run["seconds"])
    mean = sum(part.run["seconds"] for part in timed) / len(timed)
    longest = f"the slowest part {slowest.name} in {slowest.run['seconds']:,.0f} s, {mean:,.0f} s on average"
    return f"{line}; in {seconds:,.0f} s, {longest}"


def _made(stage: str, out: Path, parts: int) -> Iterator[_Made]:
    """Yield the parts whose results are current: newer than their job files."""
    for number in range(1, parts + 1):
        name = f"{number}-of-{parts}"
        run = read_json(out.parent / name / "run.json", {})
        manifest = out.parent / name / "manifest.json"
        if run and manifest.is_file() and manifest.stat().st_mtime >= _planned(stage, out.parent.name, name):
            yield _Made(name, run)


def _planned(stage: str, name: str, part: str) -> float:
    """The time of a part's job file; 0 if there is none, as after a run by hand."""
    path = job_file_of(stage, f"{name}/{part}")
    return path.stat().st_mtime if path.is_file() else 0.0
