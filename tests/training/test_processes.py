"""Workers: one trains only with the code and the files that the fingerprint was computed from."""

import os
import resource
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from snaketune.artifacts.manifest import describe_files, write_manifest
from snaketune.config.held_out import Selection
from snaketune.config.operation import Execution
from snaketune.engine.features import Options
from snaketune.errors import SnaketuneError
from snaketune.files import write_json
from snaketune.stages.cache.attempt import Attempt, stamps_of
from snaketune.stages.cache.code_digest import code_digest
from snaketune.stages.cache.fingerprint import read_artifacts
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.host.launch_command import OPERATION_FILE
from snaketune.stages.job_files import JobFile, write_job_file
from snaketune.stages.loaded_job import read_job
from snaketune.stages.outcome import Outcome
from snaketune.stages.races import FILE, PAYLOAD
from snaketune.stages.specs import RefLogpsSpec
from snaketune.stages.table import STAGES
from snaketune.training import pipeline
from snaketune.training.launch import processes, worker
from snaketune.training.prepared import TrainingRun
from tests.stages.demo_jobs import job_of

MODULE = "snaketune.training.ref_logps"


@pytest.fixture
def work(tmp_path) -> WorkFolder:
    """A work folder that was launched in."""
    work = WorkFolder(tmp_path / "work")
    work.start()
    write_json(work.state / OPERATION_FILE, {"gpus": 0})
    return work


@pytest.fixture
def run_worker(tmp_path, work, monkeypatch):
    """Run `train` as a worker process does, in an attempt with this code digest."""

    def run(train, code: str):
        base = tmp_path / "base"
        base.write_text("weights")
        Attempt(stage="sft", code=code, job="d", stamps=stamps_of([base]), threads=1).save(work.state)
        monkeypatch.setattr(worker, "read_job", lambda path: job_of("ref_logps", tmp_path, digest="d"))
        monkeypatch.setattr(worker, "build_stage", train)
        worker.main(tmp_path / "job.json", work.state)

    return run


def test_it_trains_with_the_code_of_the_fingerprint(run_worker, work):
    trained: list = []
    run_worker(lambda job, work: trained.append((job.stage.name, job.operation.gpus, work)), code_digest(MODULE))
    assert trained == [("ref_logps", 0, work)]


def test_it_trains_with_no_other_code(run_worker):
    trained: list = []
    with pytest.raises(SystemExit, match="error: the code of the sft stage changed after this run was planned"):
        run_worker(lambda *job: trained.append(job), "0" * 16)
    assert not trained


STAGE_OF = {"pack": "pack", "tokenizer": "tokenizer", "model": "sft", "base_layers": "sft", "ref_logps": "ref_logps"}
LEARNING = {"training": {"learning_rate": 1e-3}, "lora": None, "quantization": None}
SPECS = {"sft": LEARNING | {"base": None}, "dpo": LEARNING | {"trust_remote_code": False}}


class Reached(Exception):
    """The job is read, and built."""


def put(path: Path, stage: str, content: str) -> str:
    """Write the manifest of a result with this content."""
    payload = {"rows": {"digest": content}} if stage != "tokenizer" else {}
    write_manifest(path, {"payload": payload, "records": {}, "format_version": content, "stage": stage})
    return str(path)


def launched(work: WorkFolder, file: Path, job: JobFile, monkeypatch) -> None:
    """Launch a job's processes as `build_once` does, without starting any."""
    write_job_file(file, job, None)
    loaded = read_job(file)
    inputs = read_artifacts(loaded.artifacts, {})
    Attempt(stage=job.stage, code=loaded.code, stamps={}, job=loaded.digest, inputs=inputs).save(work.state)
    monkeypatch.setattr(processes, "run_processes", lambda *_: 1)
    with pytest.raises(SnaketuneError, match="ended early"):
        processes.launch(replace(loaded, operation=Execution(gpus=0, micro_batch_rows=3)), work)
    monkeypatch.setattr(worker, "import_checked", lambda *_: None)


@pytest.mark.parametrize(
    ("stage", "replaced"),
    [
        (stage, replaced)
        for stage in SPECS
        for replaced in (
            *(None, "stale", "job"),
            *(role for role, source in STAGES[stage].inputs.items() if not source.many),
        )
    ],
)
def test_a_job_or_an_artifact_that_was_replaced_since_the_fingerprint_is_refused(
    tmp_path, work, monkeypatch, stage, replaced
):
    """The result is cached under the job and the content of the artifacts that the fingerprint was computed from."""
    roles, file = [role for role, source in STAGES[stage].inputs.items() if not source.many], tmp_path / "job.json"
    inputs = {role: (put(tmp_path / f"{role}.json", STAGE_OF[role], "old"),) for role in roles}
    job = JobFile(stage=stage, out="out", spec=SPECS[stage], inputs=inputs | {"base": (str(tmp_path / "base"),)})
    launched(work, file, job, monkeypatch)
    if replaced == "stale":
        # Of a newer plan, which found the result stale for another reason.
        write_job_file(file, job, ["code differs"])
    elif replaced == "job":
        write_job_file(file, job.model_copy(update={"operation": {"log_steps": 3}}), None)
    elif replaced:
        put(tmp_path / f"{replaced}.json", STAGE_OF[replaced], "new")

    def reached(spec, work, *, operation, base, **artifacts):
        assert operation == Execution(gpus=0, micro_batch_rows=3)
        assert {role: artifacts[role].manifest_path for role in roles} == {
            role: tmp_path / f"{role}.json" for role in roles
        }
        assert base == [tmp_path / "base"]
        raise Reached

    monkeypatch.setattr(import_module(STAGES[stage].code), "build", reached)
    with pytest.raises(Reached if replaced in (None, "stale") else SystemExit) as caught:
        worker.main(file, work.state)
    if replaced == "job":
        assert "job.json, or what its race decided, changed since this job began; run again" in str(caught.value)
    elif replaced not in (None, "stale"):
        assert f"{replaced}.json changed since this job began; run again" in str(caught.value)


def test_a_job_whose_race_decided_again_is_refused(tmp_path, work, monkeypatch):
    race, file = tmp_path / "race/manifest.json", tmp_path / "job.json"

    def decide(paused: dict[str, float]) -> None:
        (race.parent / PAYLOAD).mkdir(parents=True, exist_ok=True)
        write_json(race.parent / PAYLOAD / FILE, {"paused": paused})
        payload = describe_files(race.parent / PAYLOAD)
        write_manifest(race, {"stage": "race", "payload": payload, "records": {}})

    inputs = {role: (put(tmp_path / f"{role}.json", STAGE_OF[role], "a"),) for role in ("pack", "tokenizer")}
    decide({"sft/out": 0.5})
    job = JobFile(stage="sft", out="out", spec=SPECS["sft"], inputs=inputs, operation={"race": str(race)})
    launched(work, file, job, monkeypatch)
    paused = read_job(file)
    assert (paused.paused_at, paused.spec.training.until, paused.is_snapshot) == (0.5, 0.5, True)
    decide({})
    assert read_job(file).spec.training.until is None
    with pytest.raises(SystemExit, match=r"job\.json, or what its race decided, changed since this job began"):
        worker.main(file, work.state)


def test_artifacts_reach_the_processes_in_their_order(tmp_path, work, monkeypatch):
    """The order of an adapter stack doesn't depend on names."""
    names = ("two", "one", "base", "zero")
    inputs = {role: (put(tmp_path / f"{role}.json", STAGE_OF[role], "a"),) for role in ("pack", "tokenizer")}
    inputs |= {"base_layers": tuple(put(tmp_path / f"{name}.json", "sft", name) for name in names)}
    file = tmp_path / "job.json"
    launched(work, file, JobFile(stage="sft", out="out", spec=SPECS["sft"], inputs=inputs), monkeypatch)

    def reached(spec, work, *, base_layers, **arguments):
        assert [artifact.manifest_path.stem for artifact in base_layers] == [*names]
        raise Reached

    monkeypatch.setattr(import_module(STAGES["sft"].code), "build", reached)
    with pytest.raises(Reached):
        worker.main(file, work.state)


def test_a_full_disk_is_reported_without_traceback(run_worker, tmp_path):
    from safetensors.torch import save_file
    from torch import zeros

    def train(job, work):
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
        try:
            save_file({"weights": zeros(9999)}, tmp_path / "model.safetensors")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    with pytest.raises(SystemExit, match=r"error: the results can't be written: .*Free disk space"):
        run_worker(train, code_digest(MODULE))


def test_any_other_error_keeps_its_traceback(run_worker):
    def train(job, work):
        raise RuntimeError("a fault of ours")

    with pytest.raises(RuntimeError, match="a fault of ours"):
        run_worker(train, code_digest(MODULE))


def test_files_are_compared_again_before_the_first_step(tmp_path):
    """The base is read by then, and no checkpoint is written: every checkpoint comes from the right files."""

    class Stops(Exception):
        pass

    class Trainer:
        """The methods that are called before the first step."""

        model, options = torch.nn.Linear(1, 1), Options()

        class accelerator:
            @staticmethod
            def wait_for_everyone():
                pass

        def add_callback(self, callback):
            pass

        def compile(self):
            pass

        def is_world_process_zero(self):
            return True

        def initialize_adapters(self):
            pass

        check_start = initialize_adapters

        def train(self, **_):
            raise Stops

    work = WorkFolder(tmp_path)
    run = TrainingRun(spec=SimpleNamespace(training=Selection()), operation=None, work=work, compute=None)
    base = tmp_path / "base"
    base.write_text("weights")
    (tmp_path / "state").mkdir()
    Attempt(stage="sft", code="c", stamps=stamps_of([base])).save(tmp_path / "state")
    with pytest.raises(Stops):
        pipeline.fit(Trainer(), run)
    base.write_text("others")
    with pytest.raises(SnaketuneError, match="base changed while the sft stage read it"):
        pipeline.fit(Trainer(), run)


def test_a_process_knows_whether_its_parent_lives(monkeypatch):
    monkeypatch.delenv(processes.PARENT_VARIABLE, raising=False)
    assert not worker.parent_is_gone()
    monkeypatch.setenv(processes.PARENT_VARIABLE, str(os.getpid()))
    assert not worker.parent_is_gone()
    gone = subprocess.Popen(["true"])
    monkeypatch.setenv(processes.PARENT_VARIABLE, str(gone.pid))
    # A zombie first.
    os.waitid(os.P_PID, gone.pid, os.WEXITED | os.WNOWAIT)
    assert worker.parent_is_gone()
    gone.wait()
    assert worker.parent_is_gone()


def test_a_process_ends_soon_after_its_parent_whatever_it_does(tmp_path):
    """A newer attempt may already be using the work folder."""
    gone = subprocess.Popen(["true"])
    gone.wait()
    script = (
        "import time\nfrom snaketune.training.launch import worker\n"
        "worker.POLL_SECONDS = 0.05\nworker.end_with_parent()\ntime.sleep(60)"
    )
    variables = os.environ | {processes.PARENT_VARIABLE: str(gone.pid)}
    assert subprocess.run([sys.executable, "-c", script], env=variables, timeout=50).returncode == 1


@pytest.mark.parametrize("gone", [True, False])
def test_an_orphan_records_no_failure(tmp_path, work, monkeypatch, gone):
    def fails(job, work):
        raise SnaketuneError("no")

    monkeypatch.setattr(worker, "build_stage", fails)
    monkeypatch.setattr(worker, "parent_is_gone", lambda: gone)
    monkeypatch.setattr(worker, "read_job", lambda path: job_of("sft", tmp_path))
    with pytest.raises(SystemExit):
        worker.main(tmp_path / "job.json", work.state)
    assert (work.state / "failed/0.json").exists() != gone


@pytest.mark.parametrize("rank", ["0", "1"])
def test_only_the_main_process_locks_the_folder_and_writes_the_outcome(tmp_path, monkeypatch, rank):
    work = WorkFolder(tmp_path)
    work.start()
    monkeypatch.setenv("RANK", rank)
    seen = []

    def build(spec, work, **_):
        seen.append((work.folder / "training.lock").exists())
        return Outcome(counts={"rows": 1})

    spec = RefLogpsSpec(precision="auto", frozen_weights=False, quantization=None, trust_remote_code=False)
    monkeypatch.setattr("snaketune.training.reference.gather.build", build)
    job = job_of("ref_logps", tmp_path, spec)
    worker.build_stage(replace(job, stage=replace(job.stage, inputs={})), work)
    assert seen == [rank == "0"]
    assert (work.state / "outcome.json").is_file() == (rank == "0")
