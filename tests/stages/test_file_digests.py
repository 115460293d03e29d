"""Files from outside count by content, and are read again only when something about them has changed."""

import json
import os
import shutil
import time
from pathlib import Path

import pytest

from snaketune.files import digest_file
from snaketune.stages.cache import fingerprint
from snaketune.stages.cache.fingerprint import cached_digest, compute_digest


@pytest.fixture
def data(tmp_path, monkeypatch) -> Path:
    """A file that is worth a note, and was written long enough ago for one."""
    monkeypatch.setattr(fingerprint, "CACHED_BYTES", 4)
    monkeypatch.setattr(fingerprint, "TICK_NS", 0)
    (tmp_path / "rows.jsonl").write_text("first")
    return tmp_path / "rows.jsonl"


@pytest.fixture
def reads(monkeypatch) -> list[Path]:
    """The files that were really read."""
    read: list[Path] = []
    monkeypatch.setattr(fingerprint, "digest_file", lambda path: read.append(path) or digest_file(path))
    return read


def test_a_file_is_read_once(data, reads):
    work = data.parent / "work"
    assert cached_digest(data, work) == cached_digest(data, work) == digest_file(data)
    assert reads == [data]


def test_what_a_job_has_read_needs_no_second_reading(data, reads):
    work = data.parent / "work"
    compute_digest(data, work)
    cached_digest(data, work)
    assert reads == [data]


def replaced(data: Path, how) -> None:
    """By another of the same size and time."""
    result = data.stat()
    other = data.with_name("other")
    other.write_text("other")
    os.utime(other, ns=(result.st_atime_ns, result.st_mtime_ns))
    how(other, data)
    assert (data.stat().st_size, data.stat().st_mtime_ns) == (result.st_size, result.st_mtime_ns)


@pytest.mark.parametrize("how", [shutil.copy2, os.replace])
def test_neither_the_same_size_nor_the_same_time_makes_it_the_same_file(data, how):
    work = data.parent / "work"
    first = cached_digest(data, work)
    replaced(data, how)
    assert cached_digest(data, work) == digest_file(data) != first


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"stamp": null, "digest": 3}'])
def test_a_note_that_makes_no_sense_is_written_again(data, reads, text):
    work = data.parent / "work"
    digest = cached_digest(data, work)
    (note,) = work.glob(".digests/*.json")
    note.write_text(text)
    assert cached_digest(data, work) == digest
    assert json.loads(note.read_text())["digest"] == digest
    assert reads == [data, data]


def test_a_file_of_just_now_is_not_noted_since_the_next_change_may_leave_the_same_stamp(data, monkeypatch):
    monkeypatch.setattr(fingerprint, "TICK_NS", 60_000_000_000)
    cached_digest(data, data.parent / "work")
    assert not (data.parent / "work").exists()


def test_a_file_that_changes_while_it_is_read_is_not_noted(data, monkeypatch):
    def slow(path: Path) -> str:
        digest = digest_file(path)
        time.sleep(0.01)
        path.write_text("second")
        return digest

    monkeypatch.setattr(fingerprint, "digest_file", slow)
    cached_digest(data, data.parent / "work")
    assert not (data.parent / "work").exists()


def test_notes_that_cannot_be_written_cost_nothing_but_time(data):
    (data.parent / "work").write_text("a file where the folder should be")
    assert cached_digest(data, data.parent / "work") == digest_file(data)
