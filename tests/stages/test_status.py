"""What makes a result on disk stale, one reason at a time; and which unfinished work a work folder keeps."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from snaketune.artifacts.manifest import write_manifest
from snaketune.files import write_json
from snaketune.stages.cache import work_folders
from snaketune.stages.cache.status import Results
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.job import Job
from snaketune.stages.specs import Model

JOB = Job(stage="tokenizer", name="a", spec=Model())


@pytest.fixture(autouse=True)
def result(tmp_path, monkeypatch) -> Path:
    """A current result of JOB; its manifest."""
    monkeypatch.chdir(tmp_path)
    manifest = Path(JOB.manifest)
    Path(JOB.payload).mkdir(parents=True)
    Path(JOB.payload, "rows").write_text("rows", encoding="utf-8")
    write_json(Path(JOB.run), {})
    about = {"stage": JOB.stage, "spec": JOB.plain_spec, "inputs": {}, "code": "c", "versions": {"tokenizers": "1"}}
    write_manifest(manifest, about | {"payload": {"rows": {"digest": "d", "bytes": 4}}, "records": {}})
    return manifest


def results(**changes) -> Results:
    return Results(**({"code_of": lambda stage: "c", "installed": lambda library: "1"} | changes))


def test_an_unchanged_result_is_current():
    status = results().of(JOB)
    assert status.current and status.why == ()


def damage(manifest: Path) -> None:
    manifest.write_text(manifest.read_text(encoding="utf-8").replace('"bytes": 4', '"bytes": 5'), encoding="utf-8")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (damage, "manifest.json is damaged"),
        (lambda manifest: manifest.write_text("{", encoding="utf-8"), "manifest.json can't be read"),
        (lambda _: Path(JOB.payload, "rows").write_text("more rows", encoding="utf-8"), "of another size"),
        (lambda _: Path(JOB.payload, "rows").unlink(), "files are missing"),
        (lambda _: Path(JOB.run).unlink(), "run.json is missing"),
    ],
)
def test_a_changed_file_of_a_result_is_a_reason(result, change: Callable[[Path], object], why):
    change(result)
    status = results().of(JOB)
    assert not status.current and why in status.why[0]


def test_other_code_and_other_versions_are_reasons():
    assert "code of stage tokenizer" in results(code_of=lambda stage: "d").of(JOB).why[0]
    newer = {"installed": lambda library: "2"}
    assert results(**newer).of(JOB).current
    (why,) = results(**newer, reruns_on={"tokenizer": "versions"}).of(JOB).why
    assert "tokenizers 1 → 2" in why


def test_a_forced_job_is_not_current_and_has_no_reason_of_its_own():
    status = results(is_forced=lambda job: True).of(JOB)
    assert not status.current and status.why == ()


def test_a_result_whose_race_is_undecided_is_not_current(monkeypatch):
    race = Job(stage="race", name="r", spec=Model())
    assert results().of(JOB).current
    monkeypatch.setattr(Job, "race", property(lambda job: race if job is JOB else None))
    monkeypatch.setattr(Results, "_expected_spec", lambda self, job, made_by: job.plain_spec)
    assert not results().of(JOB).current


def checkpoint(work: WorkFolder, name: str, content: str) -> Path:
    folder = work.state / f"checkpoints/{name}"
    folder.mkdir(parents=True)
    (folder / "complete").write_text(json.dumps(content), encoding="utf-8")
    return folder / "complete"


def test_own_checkpoints_are_not_replaced_by_those_of_another_result(tmp_path):
    ours, other = (WorkFolder(tmp_path / "work/sft" / name) for name in ("ours", "other"))
    checkpoint(other, "checkpoint-9", "other")
    write_json(other.manifest, {})
    kept = checkpoint(ours, "checkpoint-2", "ours")
    ours.resume_from([other])
    assert [*ours.state.glob("checkpoints/*/complete")] == [kept]
    kept.unlink()
    ours.resume_from([other])
    assert [path.parent.name for path in ours.state.glob("checkpoints/*/complete")] == ["checkpoint-9"]


def test_a_manifest_is_written_when_all_that_it_describes_is_in_place(tmp_path, monkeypatch):
    work = WorkFolder(tmp_path / "work/sft/x")
    work.start()
    there = []
    monkeypatch.setattr(
        work_folders, "write_manifest", lambda *_: there.extend([work.finished.is_dir(), work.run.is_file()])
    )
    work.finish({"payload": {}, "records": {}}, {})
    assert there == [True, True]


@pytest.mark.parametrize("keep", [True, False])
def test_a_finished_result_keeps_its_state_only_for_jobs_that_resume_from_it(tmp_path, keep):
    work = WorkFolder(tmp_path / "work/sft/x")
    work.start()
    checkpoint(work, "checkpoint-2", "ours")
    manifest = {"stage": "sft", "payload": {}, "records": {}}
    work.finish(manifest, {}, keep_state=keep)
    assert work.state.exists() == keep and work.manifest.is_file()
