"""Job files: what they hold, what their times say, and what is said of a wrong one."""

import errno
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from snaketune.errors import SnaketuneError
from snaketune.stages.host import locks
from snaketune.stages.host.locks import NoLocks
from snaketune.stages.job_files import (
    JOBS,
    LONG_AGO,
    JobFile,
    job_file_of,
    lock_job_files,
    read_job_file,
    write_job_file,
)
from snaketune.stages.loaded_job import read_job

JOB = JobFile(stage="plan", out="results/plan/x", spec={"kind": "sft"}, inputs={"tokens": ("results/t/manifest.json",)})
PATH = job_file_of("plan", "x")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_current_job_has_an_old_file_that_is_written_once():
    write_job_file(PATH, JOB, None)
    assert PATH.stat().st_mtime == LONG_AGO
    first = PATH.stat().st_ino
    write_job_file(PATH, JOB, None)
    assert PATH.stat().st_ino == first
    # The state after copying the repository.
    os.utime(PATH)
    write_job_file(PATH, JOB, None)
    assert PATH.stat().st_mtime == LONG_AGO
    assert read_job_file(PATH) == JOB


def test_a_stale_job_has_a_new_file_of_other_content_each_time():
    before = time.time() - 1
    result = set()
    for _ in range(3):
        write_job_file(PATH, JOB, ["spec differs"])
        assert PATH.stat().st_mtime >= before
        result.add(PATH.read_text(encoding="utf-8"))
    assert len(result) == 3
    job = read_job_file(PATH)
    assert job.stale == ("spec differs",)
    assert job.model_copy(update={"stale": (), "planned": None}) == JOB


def test_a_result_from_the_future_is_older_than_the_file_of_its_stale_job():
    manifest = Path(JOB.out) / "manifest.json"
    manifest.parent.mkdir(parents=True)
    manifest.write_text("{}", encoding="utf-8")
    os.utime(manifest, (time.time() + 86400,) * 2)
    write_job_file(PATH, JOB, None)
    assert manifest.stat().st_mtime > time.time()
    write_job_file(PATH, JOB, ["spec differs"])
    assert manifest.stat().st_mtime < PATH.stat().st_mtime <= time.time() + 1


def hold_elsewhere() -> subprocess.Popen:
    """Another process that has the job files."""
    code = "from snaketune.stages.job_files import lock_job_files; print(lock_job_files(), flush=True); input()"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "True\n"
    return process


@pytest.mark.parametrize("flock", [True, False])
def test_one_run_at_a_time_has_the_job_files(monkeypatch, flock):
    if not flock:
        monkeypatch.setattr(locks, "try_lock", no_locks)
    other = hold_elsewhere()
    assert not lock_job_files()
    other.kill()
    other.wait()
    if not flock:
        # Without the kernel's word, a process is gone when it has been silent for long.
        assert not lock_job_files()
        monkeypatch.setattr(locks, "WATCHED_SECONDS", 0.0)
        os.utime(JOBS / ".lock.lease", (time.time() - locks.DEAD_SECONDS - 5,) * 2)
    assert lock_job_files()


def no_locks(lock: Path):
    raise NoLocks(errno.ENOLCK, "No locks available")


def test_the_time_may_be_retained_unless_the_result_is_current_or_newer():
    write_job_file(PATH, JOB, ["spec differs"])
    text = PATH.read_bytes()
    write_job_file(PATH, JOB, ["spec differs"], keep_time=True)
    assert PATH.read_bytes() == text
    manifest = Path(JOB.out) / "manifest.json"
    manifest.parent.mkdir(parents=True)
    manifest.write_text("{}", encoding="utf-8")
    os.utime(manifest, (time.time() + 5,) * 2)
    write_job_file(PATH, JOB, ["spec differs"], keep_time=True)
    assert PATH.read_bytes() != text


def test_job_files_are_compared_without_the_status_of_the_result():
    def writes(job: JobFile) -> bool:
        return write_job_file(PATH, job, ["code differs"], keep_content=True)

    assert writes(JOB)
    write_job_file(PATH, JOB, ["spec differs"])
    assert writes(JOB)
    before = PATH.read_bytes()
    assert b"code differs" in before
    assert not writes(JOB.model_copy(update={"code": "other"}))
    assert PATH.read_bytes() == before
    PATH.write_text("{", encoding="utf-8")
    assert not writes(JOB)
    assert PATH.read_bytes() == b"{"


def test_outputs_are_where_a_default_storage_expects_them():
    shown = Path(".snakemake/storage/fs/mnt/volume") / PATH
    write_job_file(shown, JOB, None)
    assert read_job_file(shown).out == ".snakemake/storage/fs/mnt/volume/results/plan/x"
    assert read_job_file(shown.absolute()).out == JOB.out


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "Invalid JSON"),
        (json.dumps({"stage": "plan"}), "out: Field required; spec: Field required; inputs: Field required"),
        (JOB.model_dump_json().replace("inputs", "imputs"), "imputs: Extra inputs are not permitted"),
    ],
)
def test_a_wrong_file_is_refused_by_name_and_key(content, said):
    PATH.parent.mkdir(parents=True)
    PATH.write_text(content, encoding="utf-8")
    with pytest.raises(SnaketuneError, match=f"(?s)results/.jobs/plan/x.json is no job file: .*{said}"):
        read_job_file(PATH)


def test_the_error_for_a_missing_job_file_says_what_writes_it():
    with pytest.raises(SnaketuneError, match=r"results/.jobs/plan/x.json can't be read \(No such file.*snakemake -n"):
        read_job_file(PATH)


def test_a_folder_that_cannot_be_written_is_named():
    Path("results").write_text("", encoding="utf-8")
    with pytest.raises(SnaketuneError, match=r"results/.jobs/plan/x.json can't be written \(Not a directory\)"):
        write_job_file(PATH, JOB, None)
    with pytest.raises(
        SnaketuneError, match=r"results/.jobs can't be written \(Not a directory\)|results is no folder"
    ):
        lock_job_files()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"stage": "plam"}, "there is no stage 'plam'; did you mean 'plan'"),
        ({"spec": {"kind": "sft", "lengths": [8], "strategy": "none"}}, "spec is invalid: overflow: Field required"),
        ({"inputs": {"token": ()}}, "inputs: stage plan has no input token"),
        ({"operation": {"gpus": -1}}, "operation is invalid: gpus: Input should be greater than or equal to 0"),
    ],
)
def test_what_does_not_fit_the_stage_is_refused_by_key(change, said):
    spec = {"kind": "sft", "lengths": [8], "strategy": "none", "overflow": "drop"}
    with pytest.raises(SnaketuneError) as refused:
        write_job_file(PATH, JOB.model_copy(update={"spec": spec, "inputs": {}} | change), None)
        read_job(PATH)
    assert said in str(refused.value)


def test_the_digest_of_a_job_changes_with_what_it_reads_and_not_with_the_status_of_its_result():
    spec = {"kind": "sft", "lengths": [8], "strategy": "none", "overflow": "drop"}
    job = JOB.model_copy(update={"spec": spec, "inputs": {}, "code": "c"})

    def digest(job: JobFile, stale: list[str] | None) -> str:
        write_job_file(PATH, job, stale)
        return read_job(PATH).digest

    assert digest(job, None) == digest(job, ["spec differs"]) == digest(job, ["code differs"])
    changes = [{"spec": spec | {"overflow": "raise"}}, {"operation": {"gpus": 2}}, {"code": "d"}, {"out": "results/y"}]
    digests = {digest(job.model_copy(update=change), None) for change in ({}, *changes)}
    assert len(digests) == 1 + len(changes)
