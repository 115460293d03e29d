"""Keys, tokens and passwords: nothing that is written or said holds one, and a config with one is refused unquoted."""

import json
from pathlib import Path

import pytest

from snaketune import __main__
from snaketune.config.load import load
from snaketune.config.operation import Execution
from snaketune.config.secrets import without_secrets
from snaketune.errors import SnaketuneError
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.job_files import JobFile, write_job_file
from snaketune.training.launch import processes
from snaketune.training.launch.worker_endings import first_failure, record_failure
from tests.stages.demo_jobs import job_of
from tests.workflow.conftest import SECRETS

HF = SECRETS["HF_TOKEN"]
CONFIG = {
    "corpora": {"c": {"kind": "conversations", "sources": [{"hub": {"path": "a/b", "revision": "0123456789" * 4}}]}},
    "tokenizers": {"t": {"adopt": "a/b", "revision": "main"}},
}


def files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_a_run_writes_and_logs_nothing_of_its_environment(finished):
    """All stages, the notes of Snakemake, curves, checkpoints' folders; and all that was printed."""
    said = (finished.folder.parent / "micro.log").read_text(encoding="utf-8")
    assert " steps (100%) done" in said
    names = {path.name for path in files_in(finished.folder)}
    assert {"run.json", "manifest.json", "index.html", "run.log"} <= names
    for value in SECRETS.values():
        secret = value.rpartition("@")[0].rpartition(":")[2] or value
        assert secret not in said
        result = [path for path in files_in(finished.folder) if secret.encode() in path.read_bytes()]
        assert not result


def test_processes_are_given_no_environment_in_files(tmp_path, monkeypatch):
    """operation.json is in the work folder while a training runs, with accelerate's and DeepSpeed's files beside it."""
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    work = WorkFolder(tmp_path / "w")
    work.state.mkdir(parents=True)

    monkeypatch.setattr(processes, "run_processes", lambda *_: 1)
    with pytest.raises(SnaketuneError, match="ended early"):
        processes.launch(job_of("sft", tmp_path, operation=Execution(gpus=2)), work)
    written = files_in(work.folder)
    assert {"operation.json", "accelerate.yaml"} <= {path.name for path in written}
    for path in written:
        assert not [value for value in SECRETS.values() if value in path.read_text()]


PLACES = {
    "report.title": {"report": {"title": f"with {HF}"}},
    "report.note": {"report": {"note": f"https://me:word-of-mine@host/x {HF}"}},
    "corpora.c.sources.0.hub.path": {"corpora": {"c": {"sources": [{"hub": {"path": f"https://me:{HF}@hf.co/a/b"}}]}}},
    "corpora.c.sources.0.files.0": {"corpora": {"c": {"sources": [{"files": [f"s3://me:{HF}@host/x"]}]}}},
    "tokenizers.t.adopt": {"tokenizers": {"t": {"adopt": f"https://me:{HF}@hf.co/a/b"}}},
    "sft": {"sft": HF},
    "hf_token": {"hf_token": HF},
    "": {"": HF},
    "corpora.c.answer_pattern": {"corpora": {"c": {"answer_pattern": SECRETS["AWS_ACCESS_KEY_ID"]}}},
    "eval.e.key": {"eval": {"e": {"key": SECRETS["OPENAI_API_KEY"]}}},
}


@pytest.mark.parametrize("key", PLACES)
def test_a_config_with_a_secret_is_refused_before_anything_quotes_it(key):
    load(CONFIG)
    with pytest.raises(SnaketuneError) as caught:
        load(CONFIG | PLACES[key])
    message = str(caught.value)
    assert f"{key}: contains what looks like a key, a token or a password" in message
    assert not [value for value in (HF, "word-of-mine", *SECRETS.values()) if value in message]


def test_a_token_within_an_address_of_a_tracker_is_refused_too():
    uri = f"https://host/x?token={HF}"
    with pytest.raises(SnaketuneError, match="tracking: the value of tracking_uri looks like an API key") as caught:
        load(CONFIG | {"tracking": {"mlflow": {"tracking_uri": uri}}})
    assert HF not in str(caught.value)


def test_a_refused_config_is_not_quoted_by_snakemake_either(fresh):
    fresh.config["report"] = {"title": HF}
    said = fresh.snakemake("--printshellcmds", check=False)
    assert "report.title: contains what looks like a key" in said
    assert HF not in said
    assert not fresh.made()


def test_messages_of_libraries_lose_what_is_secret(monkeypatch, capsys, tmp_path):
    """An address that a library repeats may have a password in it."""

    def failing(*_, **__):
        raise SnaketuneError(f"a/b can't be loaded: https://me:word@host:80/x?token={HF} isn't there")

    monkeypatch.setattr(__main__, "run", failing)
    job_file = tmp_path / "plan.json"
    spec = {"kind": "sft", "lengths": [8], "strategy": "none", "overflow": "drop"}
    write_job_file(job_file, JobFile(stage="plan", out=str(tmp_path), spec=spec, inputs={}), None)
    assert __main__.main(["plan", str(job_file)]) == 1
    error = "error: a/b can't be loaded: https://…@host:80/x?token=… isn't there\n"
    assert capsys.readouterr().err.startswith(f"{error}to run this job by hand: python -m snaketune plan ")


def test_so_do_messages_of_launched_processes(tmp_path):
    message = without_secrets(f"out of memory at https://me:word@host {HF}")
    record_failure(tmp_path, ValueError("x"), message)
    assert first_failure(tmp_path) == "out of memory at https://…@host …"


@pytest.mark.parametrize(
    "text",
    ["0123456789abcdef0123456789abcdef01234567", "https://host/a@b", "see //x:80/y", "hf_short",
     "sketch-of-a-long-text-of-mine", r"hf_\w{20,}", "mail me@host", "http://me@host/x"],
)  # fmt: skip
def test_what_is_no_secret_stays(text):
    assert without_secrets(text) == text
    load(json.loads(json.dumps(CONFIG)) | {"report": {"note": text}})
