"""The launched process of a training: it runs the code and reads the files that the fingerprint is of, or nothing."""

import json
import resource

import pytest

from snaketune.artifacts.manifest import read_artifact, write_json
from snaketune.config.runs import Operation
from snaketune.errors import SnaketuneError
from snaketune.stages.attempt import Attempt, stamps_of
from snaketune.stages.code import code_digest
from snaketune.stages.specs import DpoSpec, SftSpec
from snaketune.stages.work import WorkFolder
from snaketune.training import dpo, dpo_worker, launch, launched, pipeline, sft, sft_worker
from snaketune.training.trainer import Run

MODULE = "snaketune.training.ref_logps"
JOB = {"stage": MODULE}


@pytest.fixture
def worker(tmp_path, monkeypatch):
    """Run `train` as a launched process does, in an attempt with this code."""

    def run(train, code: str):
        base = tmp_path / "base"
        base.write_text("weights")
        Attempt(stage="sft", code=code, stamps=stamps_of([base]), threads=1).save(tmp_path)
        (tmp_path / "job.json").write_text(json.dumps(JOB), encoding="utf-8")
        monkeypatch.setattr(launched, "work_on", train)
        launched.main(tmp_path / "job.json")

    return run


def test_it_trains_with_the_code_of_the_fingerprint(worker):
    trained: list = []
    worker(trained.append, code_digest(MODULE))
    assert trained == [JOB]


def test_it_trains_with_no_other_code(worker):
    trained: list = []
    with pytest.raises(SystemExit, match="error: the code of the sft stage changed since this run was planned"):
        worker(trained.append, "0" * 16)
    assert not trained


class Reached(Exception):
    """All artifacts are read."""


@pytest.mark.parametrize(
    ("stage", "worker", "spec", "roles", "replaced"),
    [
        (stage, worker, spec, roles, replaced)
        for stage, worker, spec, roles in (
            (sft, sft_worker, SftSpec, ("pack", "tokenizer")),
            (dpo, dpo_worker, DpoSpec, ("model", "pack", "ref_logps")),
        )
        for replaced in (None, *roles)
    ],
)
def test_an_artifact_that_was_replaced_since_the_fingerprint_is_refused(
    tmp_path, monkeypatch, stage, worker, spec, roles, replaced
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

    assert job["stage"] == stage.__name__
    assert job["worker"] == worker.__name__
    monkeypatch.setattr(Run, "of_job", lambda *_: None)
    monkeypatch.setattr("snaketune.artifacts.manifest.Artifact.files", lambda self: [])
    monkeypatch.setattr(worker, "train_on", reached)
    with pytest.raises(SnaketuneError if replaced else Reached) as caught:
        worker.train(job, work)
    if replaced:
        assert f"{replaced}.json changed since this job began; run again" in str(caught.value)
        with pytest.raises(Reached):
            worker.train({name: value for name, value in job.items() if name != "contents"}, work)


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

    class Stops(Exception):
        pass

    class Trainer:
        """As much of one as there is before the first step."""

        run = Run(spec=None, operation=None, work=WorkFolder(tmp_path), compute=None)

        class accelerator:
            @staticmethod
            def wait_for_everyone():
                pass

        def remove_callback(self, callback):
            pass

        add_callback = remove_callback

        def is_world_process_zero(self):
            return True

        def check_start(self):
            pass

        def train(self, **_):
            raise Stops

    base = tmp_path / "base"
    base.write_text("weights")
    (tmp_path / "state").mkdir()
    Attempt(stage="sft", code="c", stamps=stamps_of([base])).save(tmp_path / "state")
    with pytest.raises(Stops):
        pipeline.fit(Trainer())
    base.write_text("others")
    with pytest.raises(SnaketuneError, match="base changed while the sft stage read it"):
        pipeline.fit(Trainer())
