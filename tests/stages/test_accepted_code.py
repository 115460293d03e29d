"""Accepted code: what was made before counts as made now, for this change and no other."""

import json
from pathlib import Path

import pytest

from snaketune.errors import SnaketuneError
from snaketune.stages.cache.clean import clean
from snaketune.stages.cache.code_digest import RECORD, accept, accepted_codes
from snaketune.stages.job_files import JobFile, job_file_of, write_job_file
from snaketune.stages.outcome import Outcome

from .demo_jobs import build_demo


def run(folder: Path, code: str, built: list, **more) -> dict:
    def build(work):
        built.append(code)
        (work.payload / "rows.txt").write_text("rows")
        return Outcome()

    return json.loads(build_demo(folder, build, code=code, **more).read_text())


def test_a_result_made_with_accepted_code_is_published_as_it_is(tmp_path, capsys):
    built: list = []
    first = run(tmp_path, "a", built)
    accept({"demo": "b"}.get, tmp_path / "results")
    assert "demo/x" in capsys.readouterr().out
    assert run(tmp_path, "b", built) == first
    assert built == ["a"]
    # Another spec is computed with the current code.
    assert run(tmp_path, "b", built, spec={"n": 1})["code"] == "b"
    run(tmp_path, "c", built)
    assert built == ["a", "b", "c"]


def test_the_file_of_a_job_called_manifest_is_no_result(tmp_path, capsys):
    """It is neither accepted nor a reason to retain work."""
    run(tmp_path, "a", [])
    job = JobFile(stage="sft", out="results/sft/manifest", spec={}, inputs={})
    write_job_file(job_file_of("sft", "manifest", tmp_path / "results/.jobs"), job, None)
    accept({"demo": "b"}.get, tmp_path / "results")
    clean(tmp_path / "results/.work", remove=True)
    assert "1 results count as made with the current code" in capsys.readouterr().out


def test_what_was_accepted_for_code_is_accepted_with_it(tmp_path):
    built: list = []
    run(tmp_path, "a", built)
    accept({"demo": "b"}.get, tmp_path / "results")
    run(tmp_path, "b", built, spec={"n": 1})
    accept({"demo": "c"}.get, tmp_path / "results")
    assert accepted_codes("demo", "c", tmp_path / "results") == ("a", "b")
    run(tmp_path, "c", built)
    assert built == ["a", "b"]


def test_there_may_be_nothing_to_accept(tmp_path, capsys):
    run(tmp_path, "a", [])
    accept({"demo": "a"}.get, tmp_path / "results")
    assert "nothing to accept" in capsys.readouterr().out
    assert not (tmp_path / "results" / RECORD).exists()


def test_a_record_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / RECORD).write_text("{")
    with pytest.raises(SnaketuneError, match=RECORD):
        accepted_codes("demo", "a", tmp_path)


def test_versions_count_if_configured(tmp_path, monkeypatch):
    installed = {"torch": "1"}
    monkeypatch.setattr("snaketune.stages.run.installed_version", installed.get)
    built: list = []
    counted = {"libraries": ("torch",), "reruns_on": "versions"}
    first = run(tmp_path, "a", built, libraries=("torch",))
    assert first["versions"] == {"torch": "1"}
    # A result made before versions counted is reused if they are the same.
    assert run(tmp_path, "a", built, **counted) == first
    installed["torch"] = "2"
    run(tmp_path, "a", built, libraries=("torch",))
    assert built == ["a"]
    assert run(tmp_path, "a", built, **counted)["versions"] == {"torch": "2"}
    assert built == ["a", "a"]
    installed["torch"] = "1"
    assert run(tmp_path, "a", built, **counted) == first
    assert built == ["a", "a"]
