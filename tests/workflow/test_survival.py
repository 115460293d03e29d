"""A run that is killed anywhere resumes, with the same results as an undisturbed run."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from snaketune.config.operation import Execution
from snaketune.config.tracking import Tracking
from snaketune.errors import SnaketuneError
from snaketune.files import write_json
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.host.launch_command import OPERATION_FILE
from snaketune.stages.job import result_at
from snaketune.stages.job_files import JobFile, write_job_file
from snaketune.stages.loaded_job import read_job
from snaketune.training.launch import worker
from tests.training.event_files import SPEED, points_of

from .command_line import environment
from .conftest import ROOT

pytestmark = pytest.mark.workflow
SFT = "results/sft/run/manifest.json"
DPO = "results/dpo/run/manifest.json"
WORKER = "snaketune.training.launch.worker"


def processes(needle: str, folder: Path) -> list[int]:
    """Processes in `folder` whose command line holds `needle`."""
    result = []
    for entry in Path("/proc").iterdir():
        try:
            command = (entry / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
            if entry.name.isdigit() and needle in command and (entry / "cwd").resolve() == folder.resolve():
                result.append(int(entry.name))
        except OSError:
            continue
    return result


def kill(needle: str, project) -> None:
    for number in processes(needle, project.folder):
        # It may have ended with one that was killed before.
        with suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)


def as_in_a_terminal() -> None:
    """The tests may run under nohup, or in the background of a shell, which have signals ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def start_and_wait_for_checkpoint(project, target: str = SFT, *options: str) -> subprocess.Popen:
    """Start Snakemake, as a terminal does it in a process group of its own, and wait for one more checkpoint."""
    pattern = f"results/.work/{target.split('/')[1]}/*/state/checkpoints/checkpoint-*/complete"
    before = set(project.folder.glob(pattern))
    with (project.folder / "first.log").open("w") as log:
        running = subprocess.Popen(
            project.command(target, *options), cwd=project.folder, stdout=log, stderr=log, env=environment(), process_group=0,
            preexec_fn=as_in_a_terminal,
        )  # fmt: skip
    while not set(project.folder.glob(pattern)) - before:
        assert running.poll() is None, project.read("first.log")
        time.sleep(0.05)
    return running


def digest_of_weights(project, target: str = SFT) -> str:
    return json.loads(project.read(target))["payload"]["model.safetensors"]["digest"]


def lengthen(project):
    """On two threads, a full SFT in accumulated micro-batches and a DPO of adapters with dropout: long enough to be killed."""
    project.cores = 2
    project.config["sft"]["run"]["training"]["epochs"] = 6
    project.config["sft"]["run"]["operation"]["checkpoint_steps"] = 5
    dpo = project.config["dpo"]["run"]
    dpo["lora"] = {"rank": 2, "dropout": 0.2}
    dpo["training"]["epochs"] = 6
    dpo["operation"] = {"checkpoint_steps": 5}
    return project


def wait_until_ended(project) -> None:
    """A killed process holds its locks until it has ended."""
    while processes("", project.folder):
        time.sleep(0.05)


@pytest.mark.slow
def test_a_killed_training_resumes_and_continues_from_its_snapshot_to_the_same_weights(project):
    """The training of the finished project, again."""
    whole, drawn = project.read(SFT), learned(project, SFT)
    project.config["sft"]["run"]["training"]["snapshots"] = [0.5]
    project.config["sft"]["run"]["operation"]["checkpoint_steps"] = 1
    assert project.stale(SFT) == set()
    for folder in ("results/sft", "results/.work/sft"):
        shutil.rmtree(project.folder / folder)
    running = start_and_wait_for_checkpoint(project)
    checkpoint = next(project.folder.glob("results/.work/*/*/state/checkpoints/checkpoint-*"))
    assert not [path.name for path in checkpoint.iterdir() if path.suffix in (".pt", ".pth", ".bin", ".pkl")]
    kill("-m snaketune", project)
    assert running.wait() != 0
    wait_until_ended(project)
    assert not (project.folder / SFT).exists()
    # Old work may be cleaned in between: work that can be resumed is retained.
    assert "resumes when its config runs again" in project.snakemake("clean_work")
    said = project.snakemake(SFT)
    assert said.count("sft: made") == 2 and said.count("resuming from") == 2
    assert project.read(SFT) == whole
    assert sorted(learned(project, "results/sft/run@0.5/manifest.json") + learned(project, SFT)) == sorted(drawn)
    half, run = (json.loads(project.read(f"results/sft/run{end}")) for end in ("@0.5/manifest.json", "/run.json"))
    # Each step was trained once.
    steps = json.loads(whole)["counts"]["steps"]
    assert run["steps_of_this_process"] == steps - half["counts"]["steps"] < steps


def test_ctrl_c_and_a_closed_terminal_leave_a_checkpoint_and_no_lock(project):
    project.config["sft"]["run"]["training"]["epochs"] = 8
    project.config["sft"]["run"]["operation"]["checkpoint_steps"] = 5
    steps = []
    for number in (signal.SIGINT, signal.SIGHUP):
        running = start_and_wait_for_checkpoint(project)
        os.killpg(running.pid, number)
        assert running.wait() != 0
        wait_until_ended(project)
        log = project.read("results/logs/sft/run.log")
        (stopped,) = re.findall(r"error: stopped after step (\d+), with a checkpoint, since it was interrupted", log)
        assert f"checkpoint-{stopped}" in {path.parent.name for path in checkpoints(project)}
        steps.append(int(stopped))
    assert 0 < steps[0] < steps[1]
    said = project.snakemake(SFT)
    assert said.count("its lock of this directory is removed") == 1
    assert re.search(rf"resuming from \S+/checkpoint-{steps[1]}\n", said)


def checkpoints(project) -> set[Path]:
    return set(project.folder.glob("results/.work/sft/*/state/checkpoints/checkpoint-*/complete"))


@pytest.mark.slow
@pytest.mark.parametrize("target", [SFT, DPO])
def test_a_training_killed_on_two_threads_resumes_to_the_same_weights(finished, tmp_path, target):
    interrupted, straight = (finished.copy_to(tmp_path / name) for name in ("interrupted", "straight"))
    for project in (interrupted, straight):
        lengthen(project)
        if target == DPO:
            project.config["sft"]["run"] = finished.config["sft"]["run"]
    # So small a model is computed on one thread.
    threads = ("--set-threads", "sft=2", "dpo=2")
    running = start_and_wait_for_checkpoint(interrupted, target, *threads)
    kill("-m snaketune", interrupted)
    assert running.wait() != 0
    wait_until_ended(interrupted)
    assert not (interrupted.folder / target).exists()
    # Old work may be cleaned in between: work that can be resumed is retained.
    assert "resumes when its config runs again" in interrupted.snakemake("clean_work")
    checkpoint = next(interrupted.folder.glob("results/.work/*/*/state/checkpoints/checkpoint-*"))
    assert not [path.name for path in checkpoint.iterdir() if path.suffix in (".pt", ".pth", ".bin", ".pkl")]
    # Float32 sums depend on the number of threads, so the resumed training keeps that of its beginning.
    interrupted.cores = 1
    said = interrupted.snakemake(target, *threads)
    assert "resuming from" in said
    assert "computing with 2 threads, as the first attempt did" in said

    assert "resuming from" not in straight.snakemake(target, *threads)
    assert digest_of_weights(interrupted, target) == digest_of_weights(straight, target)
    assert interrupted.read(target) == straight.read(target)
    assert json.loads(straight.read(target))["threads"] == 2
    # Nor is there a seam in its curves, beside those of the result that was there before.
    curves, other = learned(interrupted, target), learned(straight, target)
    assert curves == other
    assert {curve for _, curve, _ in curves} >= {"train/loss"} | ({"train/margin"} if target == DPO else set())
    # The epoch is logged with a step's line and with a measurement after it.
    steps = [(step, curve) for step, curve, _ in curves if curve != "train/epoch"]
    assert len(set(steps)) == len(steps)
    assert len(list((interrupted.folder / target).parent.glob("tensorboard/*"))) == 2


def learned(project, target: str) -> list[tuple[int, str, float]]:
    """The curves of a result, but for those that say how fast it went."""
    fingerprint = json.loads(project.read(target))["fingerprint"]
    points = points_of((project.folder / target).parent / "tensorboard" / fingerprint[:8])
    return [point for point in points if point[1].removeprefix("train/") not in SPEED]


@pytest.mark.slow
def test_a_process_that_dies_takes_the_others_with_it(finished, tmp_path):
    """One of two that train, and the one that started both: the job ends, says why at last, and resumes."""
    project = lengthen(finished.copy_to(tmp_path / "two"))
    project.config["sft"]["run"]["operation"] |= {"gpus": 2, "allow_cpu": True}
    for killed in (WORKER, "accelerate.commands.launch"):
        running = start_and_wait_for_checkpoint(project)
        *_, victim = processes(f"-m {killed}", project.folder)
        os.kill(victim, signal.SIGKILL)
        assert running.wait(timeout=60) != 0
        # Workers look for their launcher every second.
        while processes(WORKER, project.folder):
            time.sleep(0.05)
        # A worker may print one more step after it.
        log = project.read("results/logs/sft/run.log").splitlines()
        (last,) = (line for line in log if line.startswith("error: "))
        assert last.startswith("error: the training process ended early")
        assert last.endswith("Run again to resume")
    assert "resuming from" in project.snakemake(SFT)
    assert json.loads(project.read("results/sft/run/run.json"))["processes"] == 2


@pytest.mark.slow
def test_a_full_disk_ends_a_training_with_what_to_do(project):
    """A limit on the size of files simulates a full disk: the first checkpoint doesn't fit."""
    project.config["sft"]["run"]["training"]["learning_rate"] = 0.004
    done = subprocess.run(
        ["bash", "-c", f"ulimit -f 100; {shlex.join(project.command(SFT))}"],
        cwd=project.folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment(),
    )  # fmt: skip
    assert done.returncode != 0
    assert "error: the results can't be written: " in done.stdout
    assert "Free disk space (snakemake clean_work frees old work)" in done.stdout
    assert "Traceback" not in done.stdout
    assert not (project.folder / SFT).exists()
    assert not list(project.folder.glob("results/.work/sft/*/state/checkpoints/*/complete"))


def job_of_sft(project, folder: Path, micro_batch_rows: int = 2) -> tuple[WorkFolder, Path]:
    """A work folder and a file of the project's SFT, as the stage hands them to the processes that it launches."""
    spec = json.loads(project.read(SFT))["spec"]
    (pack,) = project.folder.glob("results/pack/chat-*/manifest.json")
    read = {"pack": pack, "tokenizer": project.folder / "results/tokenizer/small/manifest.json"}
    work, file = WorkFolder(folder), folder / "job.json"
    work.start()
    operation = Execution(
        gpus=2,
        allow_cpu=True,
        checkpoint_steps=2,
        log_steps=1,
        micro_batch_rows=micro_batch_rows,
        gradient_checkpointing=False,
    )
    job = JobFile(
        stage="sft",
        spec=spec,
        operation=operation.model_dump(mode="json"),
        inputs={role: (str(path),) for role, path in read.items()},
        out="results/sft/run",
        tracking=Tracking(tensorboard=False),
    )
    write_job_file(file, job, None)
    write_json(work.state / OPERATION_FILE, job.operation)
    return work, file


def test_micro_batches_change_nothing_but_rounding(finished, tmp_path):
    weights = []
    for micro_batch_rows in (1, 4):
        work, job = job_of_sft(finished, tmp_path / str(micro_batch_rows), micro_batch_rows=micro_batch_rows)
        worker.build_stage(read_job(job), work)
        weights.append(load_file(work.payload / "model.safetensors"))
    for name in weights[0]:
        np.testing.assert_allclose(weights[0][name], weights[1][name], atol=2e-4, err_msg=name)


@pytest.mark.slow
def test_two_processes_learn_what_one_does(finished, tmp_path):
    """Launched as accelerate does on two GPUs (by torch's launcher), here over gloo on the CPU."""
    work, job = job_of_sft(finished, tmp_path / "two")
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2",
         "-m", "snaketune.training.launch.worker", str(job), str(work.state)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT / "workflow"), "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
    run = json.loads((work.state / "outcome.json").read_text(encoding="utf-8"))["run"]
    assert run["processes"] == 2
    alone = json.loads(finished.read("results/sft/run/run.json"))["history"]
    for one, two in zip(alone, run["history"], strict=True):
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-4)
        assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-3)
    assert (work.payload / "model.safetensors").is_file()


@pytest.mark.slow
def test_an_orphaned_training_ends_and_its_successor_waits_for_it(finished, tmp_path):
    project = lengthen(finished.copy_to(tmp_path / "orphan"))
    running = start_and_wait_for_checkpoint(project)
    # Only the stage's own process dies, as when SLURM gives a node up; the launched training lives on for a moment.
    kill("-m snaketune sft", project)
    running.wait()
    project.snakemake(SFT)
    assert not processes(WORKER, project.folder)
    assert len(list(project.folder.glob("results/.work/sft/*/payload"))) == 2


def test_a_damaged_shard_is_named_and_healed_by_the_command_given(project, monkeypatch):
    monkeypatch.chdir(project.folder)
    shard = next(Path("results/pack").glob("chat-*/shards/train-00000.arrow"))
    manifest = str(shard.parents[1] / "manifest.json")
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.chmod(0o644)
    shard.write_bytes(content)
    with pytest.raises(SnaketuneError, match=f"{shard} is damaged.*: rm {manifest} && snakemake"):
        result_at(Path(manifest)).files()
    Path(manifest).unlink()
    project.snakemake(manifest)
    result_at(Path(manifest)).files()
