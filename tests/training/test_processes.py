"""Workers: one trains only with the code and the files that the fingerprint was computed from."""

import json
import os
import resource
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch

from snaketune.artifacts.manifest import write_json
from snaketune.config.held_out import Selection
from snaketune.config.operation import Execution
from snaketune.config.tracking import Tracking
from snaketune.errors import SnaketuneError
from snaketune.stages.cache.attempt import Attempt, stamps_of
from snaketune.stages.cache.code_digest import code_digest
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.job import result_at
from snaketune.stages.outcome import Outcome
from snaketune.stages.specs import RefLogpsSpec
from snaketune.stages.table import STAGES
from snaketune.training.launch import processes, worker
from snaketune.training.loop import pipeline
from snaketune.training.loop.trainer import TrainingRun

MODULE = "snaketune.training.ref_logps"
JOB = {"stage": "ref_logps"}


@pytest.fixture
def run_worker(tmp_path, monkeypatch):
    """Run `train` as a worker process does, in an attempt with this code digest."""

    def run(train, code: str):
        base = tmp_path / "base"
        base.write_text("weights")
        Attempt(stage="sft", code=code, stamps=stamps_of([base]), threads=1).save(tmp_path)
        (tmp_path / "job.json").write_text(json.dumps(JOB), encoding="utf-8")
        monkeypatch.setattr(worker, "build_stage", train)
        worker.main(tmp_path / "job.json")

    return run


def test_it_trains_with_the_code_of_the_fingerprint(run_worker):
    trained: list = []
    run_worker(trained.append, code_digest(MODULE))
    assert trained == [JOB]


def test_it_trains_with_no_other_code(run_worker):
    trained: list = []
    with pytest.raises(SystemExit, match="error: the code of the sft stage changed after this run was planned"):
        run_worker(trained.append, "0" * 16)
    assert not trained


STAGE_OF = {"pack": "pack", "tokenizer": "tokenizer", "model": "sft", "ref_logps": "ref_logps"}


class Reached(Exception):
    """All artifacts are read."""


@pytest.mark.parametrize(
    ("stage", "replaced"),
    [(stage, replaced) for stage in ("sft", "dpo") for replaced in (None, *STAGES[stage].one)],
)
def test_an_artifact_that_was_replaced_since_the_fingerprint_is_refused(tmp_path, monkeypatch, stage, replaced):
    """The result is cached under the content of the artifacts that the fingerprint was computed from."""

    def put(role: str, content: str) -> None:
        payload = {"rows": {"digest": content}} if role != "tokenizer" else {}
        write_json(
            tmp_path / f"{role}.json",
            {"payload": payload, "records": {}, "format_version": content, "stage": STAGE_OF[role]},
        )

    roles = STAGES[stage].one
    for role in roles:
        put(role, "old")
    work = WorkFolder(tmp_path / "work")
    work.start()
    monkeypatch.setattr(processes, "run_processes", lambda *_: 1)
    with pytest.raises(SnaketuneError, match="ended early"):
        processes.launch(
            stage,
            spec=STAGES[stage].spec.model_construct(),
            work=work,
            operation=Execution(gpus=0),
            tracking=Tracking(),
            out=tmp_path / "out",
            artifacts={role: [result_at(tmp_path / f"{role}.json")] for role in roles},
            files={role: [tmp_path / "base"] for role in STAGES[stage].files},
        )
    job = json.loads((work.state / "job.json").read_text(encoding="utf-8"))
    if replaced:
        put(replaced, "new")

    def reached(spec, work, *, operation, **given):
        assert operation == Execution(gpus=0)
        assert {role: given[role].manifest_path for role in roles} == {
            role: tmp_path / f"{role}.json" for role in roles
        }
        assert given.get("base", [tmp_path / "base"]) == [tmp_path / "base"]
        raise Reached

    monkeypatch.setattr(STAGES[stage].spec, "model_validate", lambda _: None)
    monkeypatch.setattr(import_module(STAGES[stage].module), "build", reached)
    with pytest.raises(SnaketuneError if replaced else Reached) as caught:
        worker.build_stage(job)
    if replaced:
        assert f"{replaced}.json changed since this job began; run again" in str(caught.value)


def test_artifacts_reach_the_processes_in_their_order(tmp_path, monkeypatch):
    """The order of an adapter stack doesn't depend on names."""
    names = ("two", "one", "base", "zero")
    for name in names:
        write_json(tmp_path / f"{name}.json", {"payload": {}, "records": {}, "stage": "sft"})
    work = WorkFolder(tmp_path / "work")
    work.start()
    monkeypatch.setattr(processes, "run_processes", lambda *_: 1)
    with pytest.raises(SnaketuneError, match="ended early"):
        processes.launch(
            "sft",
            spec=STAGES["sft"].spec.model_construct(),
            work=work,
            operation=Execution(gpus=0),
            tracking=Tracking(),
            out=tmp_path / "out",
            artifacts={
                "model": [],
                "base_layers": [result_at(tmp_path / f"{name}.json") for name in names],
                **{role: [result_at(tmp_path / "base.json")] for role in STAGES["sft"].one},
            },
            files={"base": []},
        )

    def reached(spec, work, *, operation, base_layers, **given):
        assert [artifact.manifest_path.stem for artifact in base_layers] == [*names]
        raise Reached

    monkeypatch.setattr(STAGES["sft"].spec, "model_validate", lambda _: None)
    monkeypatch.setattr(import_module(STAGES["sft"].module), "build", reached)
    with pytest.raises(Reached):
        worker.build_stage(json.loads((work.state / "job.json").read_text(encoding="utf-8")))


def test_a_full_disk_is_reported_without_traceback(run_worker, tmp_path):
    from safetensors.torch import save_file
    from torch import zeros

    def train(job):
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
        try:
            save_file({"weights": zeros(9999)}, tmp_path / "model.safetensors")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    with pytest.raises(SystemExit, match=r"error: the results can't be written: .*Free disk space"):
        run_worker(train, code_digest(MODULE))


def test_any_other_error_keeps_its_traceback(run_worker):
    def train(job):
        raise RuntimeError("a fault of ours")

    with pytest.raises(RuntimeError, match="a fault of ours"):
        run_worker(train, code_digest(MODULE))


def test_files_are_compared_again_before_the_first_step(tmp_path):
    """The base is read by then, and no checkpoint is written: every checkpoint comes from the right files."""

    class Stops(Exception):
        pass

    class Trainer:
        """The methods that are called before the first step."""

        run = TrainingRun(
            spec=SimpleNamespace(training=Selection()), operation=None, work=WorkFolder(tmp_path), compute=None
        )
        model = torch.nn.Linear(1, 1)

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

    base = tmp_path / "base"
    base.write_text("weights")
    (tmp_path / "state").mkdir()
    Attempt(stage="sft", code="c", stamps=stamps_of([base])).save(tmp_path / "state")
    with pytest.raises(Stops):
        pipeline.fit(Trainer())
    base.write_text("others")
    with pytest.raises(SnaketuneError, match="base changed while the sft stage read it"):
        pipeline.fit(Trainer())


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
def test_an_orphan_records_no_failure(tmp_path, monkeypatch, gone):
    def fails(job):
        raise SnaketuneError("no")

    monkeypatch.setattr(worker, "build_stage", fails)
    monkeypatch.setattr(worker, "parent_is_gone", lambda: gone)
    (tmp_path / "job.json").write_text('{"stage": "sft"}', encoding="utf-8")
    with pytest.raises(SystemExit):
        worker.main(tmp_path / "job.json")
    assert (tmp_path / "failed/0.json").exists() != gone


@pytest.mark.parametrize("rank", ["0", "1"])
def test_only_the_main_process_locks_the_folder_and_writes_the_outcome(tmp_path, monkeypatch, rank):
    work = WorkFolder(tmp_path)
    work.start()
    monkeypatch.setenv("RANK", rank)
    seen = []

    def build(spec, work, **_):
        seen.append((work.folder / "training.lock").exists())
        return Outcome(counts={"rows": 1})

    spec = RefLogpsSpec(precision="auto", frozen_weights=False, quantization=None, trust_remote_code=False).model_dump()
    monkeypatch.setattr("snaketune.training.ref_logps.build", build)
    monkeypatch.setitem(STAGES, "ref_logps", replace(STAGES["ref_logps"], inputs={}, takes_operation=False))
    job = {"work": str(tmp_path), "out": "out", "stage": "ref_logps", "spec": spec, "artifacts": {}, "files": {}}
    job |= {"operation": {}, "tracking": {}}
    worker.build_stage(job)
    assert seen == [rank == "0"]
    assert (work.state / "outcome.json").is_file() == (rank == "0")


def test_a_worker_that_ignored_sigterm_while_importing_gets_it_again(tmp_path):
    """A worker inherits that SIGTERM is ignored, until it can stop with a checkpoint."""
    inner = tmp_path / "inner.py"
    inner.write_text(
        "import signal, sys, time, pathlib\n"
        "pathlib.Path(sys.argv[1]).touch()\n"
        "time.sleep(3)\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\n"
        "time.sleep(60)\n"
    )
    started = tmp_path / "started"
    outer = (
        "import os, signal, sys, threading, time, pathlib\n"
        "from snaketune.training.launch.processes import run_processes\n"
        "def terminate():\n"
        "    while not pathlib.Path(sys.argv[2]).exists(): time.sleep(0.05)\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "threading.Thread(target=terminate, daemon=True).start()\n"
        "sys.exit(run_processes([sys.executable, sys.argv[1], sys.argv[2]], dict(os.environ)))\n"
    )
    done = subprocess.run([sys.executable, "-c", outer, str(inner), str(started)], timeout=50)
    assert done.returncode == 7


def test_workers_on_other_nodes_get_sigterm_through_scancel(tmp_path):
    """SIGTERM to srun kills its step immediately; scancel sends the signal to the workers of the step."""
    tools, step = tmp_path / "tools", tmp_path / "step"
    tools.mkdir()
    # Stands in for scancel: sends the signal to the step's only process.
    (tools / "scancel").write_text(f'#!/bin/sh\necho "$*" > {tmp_path}/called\nkill -USR1 $(cat {tmp_path}/task)\n')
    (tools / "scancel").chmod(0o755)
    task = (
        "import os, pathlib, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))\n"
        "signal.signal(signal.SIGUSR1, lambda *_: sys.exit(7))\n"
        f"pathlib.Path({str(tmp_path / 'task')!r}).write_text(str(os.getpid()))\n"
        f"pathlib.Path({str(step)!r}).write_text('17.0\\n')\n"
        "time.sleep(60)\n"
    )
    launcher = (
        "import os, pathlib, signal, sys, threading, time\n"
        "from snaketune.training.launch.processes import run_processes\n"
        f"step = pathlib.Path({str(step)!r})\n"
        "def terminate():\n"
        "    while not step.exists(): time.sleep(0.05)\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "threading.Thread(target=terminate, daemon=True).start()\n"
        "sys.exit(run_processes([sys.executable, '-c', sys.argv[1]], dict(os.environ), step))\n"
    )
    environment = os.environ | {"PATH": f"{tools}:{os.environ['PATH']}"}
    done = subprocess.run([sys.executable, "-c", launcher, task], env=environment, timeout=50)
    assert done.returncode == 7
    assert (tmp_path / "called").read_text() == "--signal=TERM 17.0\n"
