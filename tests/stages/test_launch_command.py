"""The plan of a training in several processes, and what is refused before anything runs."""

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from snaketune.config.load import load
from snaketune.config.operation import Operation
from snaketune.errors import SnaketuneError
from snaketune.stages.graph import JobGraph
from snaketune.stages.host import launch_command
from snaketune.stages.host.launch_command import (
    check_installed,
    check_limit,
    check_nodes,
    command,
    describe_launch,
    node_lines,
)

ROOT = Path(__file__).parents[2]
JOB, STATE = Path("results/.jobs/sft/a.json"), Path("results/.work/sft/FINGERPRINT/state")


def test_what_a_node_is_planned_to_run_is_what_it_runs():
    """The same except for the interpreter and the rank, which SLURM sets."""
    alone = Operation(gpus=4, launch="fsdp")
    assert node_lines(alone, JOB, STATE) == [" ".join(command(alone, JOB, STATE))]
    several = Operation(gpus=8, nodes=3)
    *_, shell, option, line = command(several, JOB, STATE, sys.executable)
    assert (shell, option) == ("bash", "-c")
    # Signals are for the trainings; the launcher, which may have to forward one, reads the step's number from a file.
    begins, line = line.split("; exec ")
    assert begins.startswith('trap "" TERM; ') and begins.endswith(f'"$SLURM_JOB_ID.$SLURM_STEP_ID" > {STATE}/step')
    for rank, output in enumerate(node_lines(several, JOB, STATE)):
        assert line == output.replace("python", sys.executable, 1).replace(f"_rank {rank} ", "_rank $SLURM_NODEID ")


def recipe(name: str) -> dict[str, Any]:
    return yaml.safe_load((ROOT / f"config/recipes/{name}.yaml").read_text(encoding="utf-8"))


def test_the_recipe_for_eight_gpus_shows_its_one_command(monkeypatch):
    monkeypatch.chdir(ROOT)
    graph = JobGraph(*load(recipe("qwen3-8b-full")))
    for stage in ("sft", "dpo"):
        head, only = describe_launch(graph.job(stage, "qwen3-8b"))
        assert head == f"{stage}/qwen3-8b: 8 processes (fsdp), one for each of 8 GPUs"
        state = f"results/.work/{stage}/FINGERPRINT/state"
        assert only == (
            "  node 1: env PET_STANDALONE=1 PET_LOCAL_ADDR=127.0.0.1 python -m accelerate.commands.launch --quiet "
            f"--config_file {state}/accelerate.yaml --module snaketune.training.launch.worker "
            f"results/.jobs/{stage}/qwen3-8b.json {state}"
        )
    assert not [*describe_launch(next(graph.stage("ref_logps")))]
    assert not [*describe_launch(next(graph.stage("eval")))]


def test_the_recipe_for_two_nodes_shows_the_command_of_each():
    graph = JobGraph(*load(recipe("llama3.1-70b-qlora-2x8")))
    head, *lines = describe_launch(graph.job("sft", "llama3.1-70b-qlora"))
    assert head == (
        "sft/llama3.1-70b-qlora: 16 processes (fsdp), one for each of 8 GPUs on each of 2 nodes, by srun --nodes=2 --ntasks=2 "
        "--ntasks-per-node=1 --kill-on-bad-exit=1 --cpu-bind=none --input=none"
    )
    assert lines == [
        f"  node {rank + 1}: python -m accelerate.commands.launch --quiet --config_file {STATE}/accelerate.yaml "
        f"--machine_rank {rank} "
        "--main_process_ip $SLURM_LAUNCH_NODE_IPADDR --main_process_port $((10000 + SLURM_JOB_ID % 20000)) "
        f"--module snaketune.training.launch.worker results/.jobs/sft/llama3.1-70b-qlora.json {STATE}"
        for rank in range(2)
    ]


def test_several_nodes_need_a_batch_job_of_slurm(monkeypatch, tmp_path):
    monkeypatch.delenv("SLURMD_NODENAME", raising=False)
    check_nodes(Operation())
    needs = "operation.nodes: 2 nodes need a SLURM batch job.*--profile profiles/slurm, or set nodes: 1"
    with pytest.raises(SnaketuneError, match=needs):
        check_nodes(Operation(nodes=2))
    monkeypatch.setenv("SLURMD_NODENAME", "node1")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SnaketuneError, match=needs):
        check_nodes(Operation(nodes=2))
    (tmp_path / "srun").touch(mode=0o755)
    check_nodes(Operation(nodes=2))


def test_missing_deepspeed_is_reported_with_what_to_do(monkeypatch):
    monkeypatch.setattr(launch_command, "find_spec", lambda name: None)
    check_installed(Operation(launch="fsdp"))
    with pytest.raises(SnaketuneError, match=r"pip install 'snaketune\[deepspeed\]', or set launch: fsdp"):
        check_installed(Operation(launch="deepspeed"))
    monkeypatch.setattr(launch_command, "find_spec", lambda name: name)
    check_installed(Operation(launch="deepspeed"))


@pytest.mark.parametrize(
    ("gpus", "most", "visible", "refused"),
    [(4, 2, "0,1", True), (2, 2, "0,1", False), (4, None, "0,1", False), (4, 1, "", False), (1, 0, "0", False)],
)
def test_a_job_holds_no_more_gpus_than_the_run_may(monkeypatch, gpus, most, visible, refused):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    if not refused:
        check_limit(Operation(gpus=gpus), most)
        return
    with pytest.raises(SnaketuneError, match=f"operation.gpus: {gpus} GPUs, but this run may use {most}"):
        check_limit(Operation(gpus=gpus), most)


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        (
            {"launch": "single", "gpus": 2},
            "launch: single is one process, but gpus: 2 and nodes: 1 make 2; expected ddp, fsdp or",
        ),
        ({"launch": "single", "nodes": 2}, "launch: single is one process, but gpus: 1 and nodes: 2 make 2"),
        ({"launch": "auto"}, "launch: found 'auto'; expected 'single', 'ddp', 'fsdp' or 'deepspeed'"),
        ({"zero_stage": 3}, "zero_stage: 3 has no effect with launch: single; set launch: deepspeed"),
        ({"gpus": 2, "zero_stage": 2}, "zero_stage: 2 has no effect with launch: ddp"),
        ({"launch": "deepspeed", "zero_stage": 1}, "zero_stage: found 1; expected at least 2"),
        ({"nodes": 0}, "nodes: found 0"),
        ({"nodes": True}, "nodes: found true"),
    ],
)
def test_contradictions_are_refused_by_key_and_value(operation, expected, monkeypatch):
    monkeypatch.chdir(ROOT)
    config = yaml.safe_load(Path("config/config.yaml").read_text(encoding="utf-8"))
    config["sft"]["demo"]["operation"] = operation
    with pytest.raises(SnaketuneError) as refused:
        load(config)
    assert f"sft.demo.operation.{expected}" in str(refused.value)


def test_a_batch_that_processes_cannot_share_is_refused(monkeypatch):
    monkeypatch.chdir(ROOT)
    config = yaml.safe_load(Path("config/config.yaml").read_text(encoding="utf-8"))
    for section in ("sft", "dpo"):
        run = config[section]["demo"]
        run["training"] |= {"batch_rows": 12, "micro_batch_rows": 2}
        run["operation"] = {"gpus": 2, "nodes": 2}
    with pytest.raises(SnaketuneError) as refused:
        load(config)
    for section in ("sft", "dpo"):
        assert (
            f"{section}.demo: training.batch_rows: 12 rows can't be divided into micro-batches of 2 in 4 processes "
            "(operation.gpus x nodes); expected a multiple of 8"
        ) in str(refused.value)


@pytest.mark.parametrize(
    ("given", "launch", "zero_stage", "processes"),
    [
        ({}, "single", None, 1),
        ({"gpus": 0}, "single", None, 1),
        ({"gpus": 2}, "ddp", None, 2),
        ({"gpus": 0, "nodes": 3}, "ddp", None, 3),
        ({"gpus": 8, "nodes": 2, "launch": "fsdp"}, "fsdp", None, 16),
        ({"launch": "deepspeed"}, "deepspeed", 2, 1),
    ],
)
def test_unset_keys_follow_from_the_number_of_processes(given, launch, zero_stage, processes):
    operation = Operation(**given)
    assert (operation.launch, operation.zero_stage, operation.processes) == (launch, zero_stage, processes)
    # Serialized as for the launched processes.
    assert Operation.model_validate(operation.model_dump(mode="json")) == operation
