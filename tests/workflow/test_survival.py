"""Killed anywhere, it goes on, and what comes out is what would have come out."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.workflow
SFT = "results/sft/run/manifest.json"


def processes(needle: str, folder: Path) -> list[int]:
    """Processes below `folder` whose command line holds `needle`."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            command = (entry / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
            if entry.name.isdigit() and needle in command and (entry / "cwd").resolve() == folder.resolve():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def start_and_wait_for_checkpoint(project) -> subprocess.Popen:
    log = (project.folder / "first.log").open("w")
    running = subprocess.Popen(
        project.command(SFT),
        cwd=project.folder,
        stdout=log,
        stderr=log,
        env=os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
    )
    while not list(project.folder.glob("results/.work/sft/*/state/checkpoints/checkpoint-*/complete")):
        assert running.poll() is None, project.read("first.log")
        time.sleep(0.05)
    return running


def digest_of_weights(project) -> str:
    return json.loads(project.read(SFT))["payload"]["model.safetensors"]["digest"]


def lengthen(project):
    project.config["sft"]["run"]["training"]["epochs"] = 20
    project.config["sft"]["run"]["operation"]["checkpoint_steps"] = 5
    return project


def test_a_killed_training_resumes_to_the_same_weights(finished, tmp_path):
    interrupted = lengthen(finished.copy_to(tmp_path / "interrupted"))
    running = start_and_wait_for_checkpoint(interrupted)
    for process in processes("snaketune", interrupted.folder):
        if process != running.pid:
            os.kill(process, signal.SIGKILL)
    assert running.wait() != 0
    assert not (interrupted.folder / SFT).exists()
    said = interrupted.snakemake(SFT)
    assert "resuming from" in said

    straight = lengthen(finished.copy_to(tmp_path / "straight"))
    assert "resuming from" not in straight.snakemake(SFT)
    assert digest_of_weights(interrupted) == digest_of_weights(straight)
    assert interrupted.read(SFT) == straight.read(SFT)


def test_an_orphaned_training_ends_and_its_successor_waits_for_it(finished, tmp_path):
    project = lengthen(finished.copy_to(tmp_path / "orphan"))
    running = start_and_wait_for_checkpoint(project)
    # Only the stage's own process dies, as when SLURM gives a node up; the launched training lives on for a moment.
    for process in processes("-m snaketune sft", project.folder):
        if process != running.pid:
            os.kill(process, signal.SIGKILL)
    running.wait()
    project.snakemake(SFT)
    assert not processes("snaketune.training.sft", project.folder)
    assert len(list(project.folder.glob("results/.work/sft/*/payload"))) == 2


def test_a_damaged_shard_is_named_and_healed_by_the_command_given(project):
    shard = next(project.folder.glob("results/pack/chat-*/shards/train-00000.arrow"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    project.config["sft"]["run"]["training"]["learning_rate"] = 0.003
    said = project.snakemake(SFT, check=False)
    relative = shard.relative_to(project.folder)
    assert f"{relative} is damaged" in said
    assert "Traceback" not in said
    heal = f"--forcerun {relative.parent.parent}/manifest.json"
    assert heal in said
    project.snakemake(SFT, "--forcerun", f"{relative.parent.parent}/manifest.json")
    assert json.loads(project.read(SFT))["spec"]["training"]["learning_rate"] == 0.003
