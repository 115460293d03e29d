"""The launcher: how it starts the processes of a training, and what it makes of their end."""

import os
import subprocess
import sys
from typing import Any

import pytest
import yaml

from snaketune.config.operation import Operation
from snaketune.errors import SnaketuneError
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.training.launch import processes, worker
from snaketune.training.launch.worker_endings import record_failure
from tests.stages.demo_jobs import job_of


def test_the_launcher_imports_no_torch():
    heavy = (
        "import sys, snaketune.__main__, snaketune.stages.table as table\n"
        "[__import__(stage.launcher) for stage in table.STAGES.values() if stage.launcher]\n"
        "print({'torch', 'transformers'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", heavy], capture_output=True, text=True).stdout == "set()\n"


def launched_with(
    tmp_path, monkeypatch, operation: Operation, visible: list[str], status: int = 0, outcome: str = ""
) -> tuple[list[str], dict[str, Any], dict[str, str]]:
    """Run a launch with this exit status and outcome; return its command, accelerate's config and its environment."""
    work = WorkFolder(tmp_path)
    work.start()
    (work.state / "outcome.json").write_text('{"counts": {"of": "an earlier attempt"}}')
    record_failure(work.state, SnaketuneError("of an earlier attempt"), "of an earlier attempt")
    seen = []

    def run(command, variables, step):
        config = work.state / "accelerate.yaml"
        seen.append(
            (command, yaml.safe_load(config.read_text(encoding="utf-8")) if config.exists() else None, variables)
        )
        if outcome:
            (work.state / "outcome.json").write_text(outcome)
        return status

    monkeypatch.setattr(processes, "run_processes", run)
    monkeypatch.setattr(processes, "visible_gpus", lambda: visible)
    made = processes.launch(job_of("sft", tmp_path, operation=operation), work)
    assert made.counts == {"of": "this one"}
    return seen[0]


@pytest.mark.parametrize(
    ("operation", "visible", "count", "kind", "cpu"),
    [
        ({"gpus": 1}, [], 1, None, True),
        ({"gpus": 0}, ["0"], 1, None, False),
        ({"gpus": 1}, ["0", "1"], 1, None, False),
        ({"gpus": 2}, ["0", "1"], 2, "MULTI_GPU", False),
        ({"gpus": 2}, ["0", "1", "2"], 2, "MULTI_GPU", False),
        ({"gpus": 3}, [], 3, "MULTI_GPU", True),
        ({"gpus": 1, "launch": "fsdp"}, ["0"], 1, "MULTI_GPU", False),
    ],
)
def test_one_process_per_requested_gpu(tmp_path, monkeypatch, operation, visible, count, kind, cpu):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    command, config, environment = launched_with(
        tmp_path, monkeypatch, Operation(**operation), visible, outcome='{"counts": {"of": "this one"}}'
    )
    if kind:
        assert (config["num_processes"], config["distributed_type"], config["use_cpu"]) == (count, kind, cpu)
    else:
        # A single process is started without accelerate.
        assert config is None
        assert command[:-3] == [sys.executable, "-m"]
    assert command[-3:] == [worker.__name__, str(tmp_path / "job.json"), str(tmp_path / "state")]
    assert environment[processes.PARENT_VARIABLE] == str(os.getpid())
    assert environment["OMP_NUM_THREADS"] == str(7 // count)


def test_fewer_gpus_than_requested_are_refused(tmp_path, monkeypatch):
    with pytest.raises(
        SnaketuneError, match=r"operation\.gpus: the job asks for 4 GPUs on each node, this node shows it 2"
    ):
        launched_with(tmp_path, monkeypatch, Operation(gpus=4), ["0", "1"])


@pytest.mark.parametrize(("status", "how"), [(1, "exit status 1"), (-9, "killed by signal 9"), (0, "exit status 0")])
def test_a_launch_without_outcome_failed_whatever_an_earlier_one_reported(tmp_path, monkeypatch, status, how):
    with pytest.raises(SnaketuneError, match=rf"the training process ended early \({how}\).*Run again to resume"):
        launched_with(tmp_path, monkeypatch, Operation(), [], status)
