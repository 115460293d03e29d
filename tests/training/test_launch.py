"""The launched process of a training: it runs the code and reads the files that the fingerprint is of, or nothing."""

import json
import resource
import sys

import pytest

from snaketune.artifacts.manifest import read_artifact, write_json
from snaketune.config.runs import Operation
from snaketune.errors import SnaketuneError
from snaketune.stages.attempt import Attempt, stamps_of
from snaketune.stages.code import code_digest
from snaketune.stages.specs import DpoSpec, SftSpec
from snaketune.stages.work import WorkFolder
from snaketune.training import dpo, launch, sft
from snaketune.training.launch import run_worker

MODULE = "snaketune.training.ref_logps"


@pytest.fixture
def worker(tmp_path, monkeypatch):
    """Run `train` as a launched process does, in an attempt with this code."""

    def run(train, code: str):
        base = tmp_path / "base"
        base.write_text("weights")
        Attempt(stage="sft", code=code, stamps=stamps_of([base]), threads=1).save(tmp_path)
        (tmp_path / "job.json").write_text(json.dumps({"module": MODULE}), encoding="utf-8")
        monkeypatch.setattr(sys, "argv", ["worker", str(tmp_path / "job.json")])
        run_worker(train)

    return run


def test_it_trains_with_the_code_of_the_fingerprint(worker):
    trained: list = []
    worker(trained.append, code_digest(MODULE))
    assert trained == [{"module": MODULE}]


def test_it_trains_with_no_other_code(worker):
    trained: list = []
    with pytest.raises(SystemExit, match="error: the code of the sft stage changed since this run was planned"):
        worker(trained.append, "0" * 16)
    assert not trained


class Reached(Exception):
    """All artifacts are read."""


@pytest.mark.parametrize(
    ("stage", "spec", "roles", "replaced"),
    [
        (stage, spec, roles, replaced)
        for stage, spec, roles in (
            (sft, SftSpec, ("pack", "tokenizer")),
            (dpo, DpoSpec, ("model", "pack", "ref_logps")),
        )
        for replaced in (None, *roles)
    ],
)
def test_an_artifact_that_was_replaced_since_the_fingerprint_is_refused(
    tmp_path, monkeypatch, stage, spec, roles, replaced
):
    """Whose content the result is kept under; a job written by hand says nothing of it."""

    def put(role: str, content: str) -> None:
        payload = {"rows": {"digest": content}} if role != "tokenizer" else {}
        write_json(tmp_path / f"{role}.json", {"payload": payload, "records": {}, "format_version": content})

    for role in roles:
        put(role, "old")
    work = WorkFolder(tmp_path / "work")
    work.start()
    monkeypatch.setattr(launch.subprocess, "run", lambda *_, **__: type("Done", (), {"returncode": 1}))
    with pytest.raises(SnaketuneError, match="ended early"):
        stage.build(
            spec.model_construct(),
            work,
            operation=Operation(gpus=0),
            **{role: read_artifact(tmp_path / f"{role}.json", "rows") for role in roles},
            **({"base": []} if stage is sft else {}),
        )
    job = json.loads((work.state / "job.json").read_text(encoding="utf-8"))
    if replaced:
        put(replaced, "new")

    def reached(*_, **__):
        raise Reached

    monkeypatch.setattr(spec, "model_validate", lambda _: None)
    monkeypatch.setattr("snaketune.artifacts.manifest.Artifact.files", lambda self: [])
    monkeypatch.setattr("snaketune.tokenization.chat.ChatTokenizer.load", reached)
    monkeypatch.setattr(dpo, "_train", reached)
    with pytest.raises(SnaketuneError if replaced else Reached) as caught:
        stage.train(job)
    if replaced:
        assert f"{replaced}.json changed since this job began; run again" in str(caught.value)
        with pytest.raises(Reached):
            stage.train({name: value for name, value in job.items() if name != "contents"})


def test_a_full_disk_is_told_and_no_traceback(worker, tmp_path):
    from safetensors.torch import save_file
    from torch import zeros

    def train(job):
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
        try:
            save_file({"weights": zeros(9999)}, tmp_path / "model.safetensors")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    with pytest.raises(SystemExit, match=r"error: the results can't be written: .*Make room"):
        worker(train, code_digest(MODULE))


def test_any_other_error_keeps_its_traceback(worker):
    def train(job):
        raise RuntimeError("a fault of ours")

    with pytest.raises(RuntimeError, match="a fault of ours"):
        worker(train, code_digest(MODULE))


def test_before_the_first_step_the_files_are_compared_once_more(tmp_path):
    """With the base read, and no checkpoint written: what a resumed training goes on with came of the right files."""
    from snaketune.training.trainer import fit

    class Stops(Exception):
        pass

    class Trainer:
        """As much of one as there is before the first step."""

        class accelerator:
            @staticmethod
            def wait_for_everyone():
                pass

        def remove_callback(self, callback):
            pass

        add_callback = remove_callback

        def is_world_process_zero(self):
            return True

        def train(self, **_):
            raise Stops

    base = tmp_path / "base"
    base.write_text("weights")
    Attempt(stage="sft", code="c", stamps=stamps_of([base])).save(tmp_path)
    with pytest.raises(Stops):
        fit(Trainer(), tmp_path / "checkpoints")
    base.write_text("others")
    with pytest.raises(SnaketuneError, match="base changed while the sft stage read it"):
        fit(Trainer(), tmp_path / "checkpoints")
