"""A corpus in parts as a whole: kills, what edits of files and keys read again, and the same bytes as in one job."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from .command_line import environment
from .conftest import Project
from .test_survival import processes

pytestmark = [pytest.mark.workflow, pytest.mark.slow]

TARGET = "results/corpus/chat/manifest.json"
FILES = ("a.jsonl", "b.jsonl", "c.jsonl")
ROWS = 12_000


def _rows(folder: Path, name: str, first: int) -> None:
    with (folder / "data" / name).open("w", encoding="utf-8") as file:
        for number in range(first, first + ROWS):
            # Every tenth row is also in the next file.
            shared = number + ROWS - number % ROWS if number % 10 == 0 else number
            turns = [{"role": "user", "content": f"question {shared}"}, {"role": "assistant", "content": "yes " * 40}]
            file.write(json.dumps({"messages": turns}) + "\n")


@pytest.fixture
def wide(tmp_path) -> Project:
    project = Project(tmp_path / "wide").write_data()
    for number, name in enumerate(FILES):
        _rows(project.folder, name, number * ROWS)
    sources = [{"files": [f"data/{name}"]} for name in FILES]
    project.config = {"corpora": {"chat": {"kind": "conversations", "sources": sources, "held_out": 0.2, "parts": 3}}}
    project.cores = 2
    return project


def _started(project: Project, stage: str) -> dict[str, str]:
    runs = (project.folder / f"results/{stage}/chat").glob("*/run.json")
    return {path.parent.name: json.loads(path.read_text())["started"] for path in runs}


def test_a_killed_part_loses_itself_only_and_a_changed_file_reads_its_part(wide, tmp_path):
    whole = wide.copy_to(tmp_path / "whole")
    whole.config["corpora"]["chat"]["parts"] = 1
    whole.snakemake(TARGET)
    running = subprocess.Popen(
        wide.command("--keep-going", TARGET), cwd=wide.folder, env=environment(), stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    while running.poll() is None and not (found := processes("read/chat/3-of-3", wide.folder)):
        time.sleep(0.02)
    assert found
    for number in found:
        os.kill(number, signal.SIGKILL)
    assert running.wait() != 0
    kept = _started(wide, "read")
    assert kept.keys() == {"1-of-3", "2-of-3"}
    wide.snakemake(TARGET)
    assert kept.items() <= _started(wide, "read").items()
    manifests = [json.loads(project.read(TARGET)) for project in (wide, whole)]
    assert manifests[0]["payload"] == manifests[1]["payload"] and manifests[0]["counts"] == manifests[1]["counts"]
    assert manifests[0]["counts"]["dropped"]["duplicate"] > 1000
    log = wide.read("results/logs/read/chat/3-of-3.log")
    assert "read: 3 of 3 parts of chat are made" in log and "MB/s" in log and "the slowest part" in log
    # Which rows are used is decided without reading them again.
    assert wide.stale(TARGET) == set()
    source = wide.config["corpora"]["chat"]["sources"][0]
    source["max_rows"] = 100
    assert wide.stale(TARGET) == {"decide", "filter", "corpus"}
    del source["max_rows"]
    # A changed file reads its own part.
    before = _started(wide, "read")
    _rows(wide.folder, FILES[1], 7 * ROWS)
    assert wide.stale(TARGET) == {"read", "decide", "filter", "corpus"}
    # So that a part that is read again has a later time.
    time.sleep(1)
    wide.snakemake(TARGET)
    after = _started(wide, "read")
    assert {name for name in after if after[name] != before[name]} == {"2-of-3"}
