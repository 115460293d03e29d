"""What a part says of all parts: how many are made, at which rate, how long the others take, and the slowest."""

import json
import os
import time
from pathlib import Path

import pytest

from snaketune.stages.part_progress import TIME, part_progress

PLANNED = 1_000_000.0


def _part(number: int, start: float, seconds: float, *, planned: float = PLANNED, **run: int) -> None:
    """A part's job file and result. Args: start: of its job, and planned: of its job file, in seconds."""
    name = f"{number}-of-4"
    job_file, out = Path(f"results/.jobs/read/chat/{name}.json"), Path(f"results/read/chat/{name}")
    for folder in (job_file.parent, out):
        folder.mkdir(parents=True, exist_ok=True)
    job_file.touch()
    os.utime(job_file, (planned, planned))
    facts = {"started": time.strftime(TIME, time.gmtime(start)), "seconds": seconds, "attempts": [seconds]}
    (out / "run.json").write_text(json.dumps(facts | run))
    (out / "manifest.json").touch()
    os.utime(out / "manifest.json", (start + seconds, start + seconds))


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def _said() -> str | None:
    return part_progress("read", Path("results/read/chat/1-of-4"))


def test_rate_and_time_left():
    _part(1, PLANNED + 5, 10, rows_read=2000, bytes_read=40_000_000)
    _part(2, PLANNED + 5, 20, rows_read=2000, bytes_read=40_000_000)
    assert _said() == "read: 2 of 4 parts of chat are made, 4.0 MB/s, 200 rows/s, 20 s left"


def test_the_slowest_when_all_are_made():
    for number in range(1, 5):
        _part(number, PLANNED + 5, 10 * number)
    assert _said() == ("read: 4 of 4 parts of chat are made; in 40 s, the slowest part 4-of-4 in 40 s, 25 s on average")


def test_current_parts_of_earlier_runs_count_as_made_and_stale_ones_dont():
    _part(1, PLANNED + 5, 10)
    # Its job file was written when it had become stale, and that of the third keeps its time before the result.
    _part(2, PLANNED - 500, 10)
    _part(3, PLANNED - 500, 100, planned=PLANNED - 600)
    assert _said().startswith("read: 2 of 4 parts of chat are made, ")


def test_one_part_says_nothing():
    assert part_progress("sft", Path("results/sft/demo")) is None
    assert part_progress("read", Path("results/read/chat/1-of-1")) is None
