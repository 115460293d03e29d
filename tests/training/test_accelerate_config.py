"""The configs of accelerate and DeepSpeed, as accelerate and DeepSpeed read them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from snaketune.config.operation import Operation
from snaketune.stages.host.launch_command import ACCELERATE_FILE, command
from snaketune.training.launch.accelerate_config import accelerate_config, deepspeed_config, write_launch_files

WRITE_ENVIRONMENT = """
import json, os, sys
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
variables = {name: value for name, value in os.environ.items() if name in names or name.startswith(("ACCELERATE_", "FSDP_"))}
with open(f"{sys.argv[1]}.{os.environ.get('RANK', 0)}", "w") as file:
    json.dump(variables, file)
"""

CHECK = """
import json, sys
from deepspeed.runtime.config import DeepSpeedConfig
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments
from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

arguments = TrainingArguments(
    output_dir="out", use_cpu=True, per_device_train_batch_size=2, gradient_accumulation_steps=3, max_grad_norm=0.7, bf16=True
)
shape = LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=9)
model = LlamaForCausalLM(shape)
for file in sys.argv[1:]:
    config = HfTrainerDeepSpeedConfig(file)
    config.trainer_config_process(arguments)
    config.trainer_config_finalize(arguments, model, 10)
    read = DeepSpeedConfig(config.config)
    print(json.dumps({
        "unset": [key for key, value in config.config["zero_optimization"].items() if value == "auto"],
        "stage": read.zero_optimization_stage,
        "batch": [read.train_batch_size, read.train_micro_batch_size_per_gpu, read.gradient_accumulation_steps],
        "clipping": read.gradient_clipping,
        "bfloat16": read.bfloat16_config.enabled,
        "bucket": read.zero_config.reduce_bucket_size,
        "any_optimizer": read.zero_allow_untested_optimizer,
    }))
"""


@pytest.mark.slow
def test_deepspeed_takes_its_config_as_the_trainer_fills_it_in(with_deepspeed, tmp_path):
    stages = (2, 3)
    files = [tmp_path / f"{stage}.json" for stage in stages]
    for stage, file in zip(stages, files):
        file.write_text(json.dumps(deepspeed_config(stage)), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", CHECK, *files], cwd=tmp_path, env=with_deepspeed, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for stage, line in zip(stages, done.stdout.splitlines()[-2:], strict=True):
        # The hidden size is 16; DeepSpeed recommends its square.
        bucket = 256 if stage == 3 else 500_000_000
        assert json.loads(line) == {
            "unset": [], "stage": stage, "batch": [6, 2, 3], "clipping": 0.7, "bfloat16": True, "bucket": bucket,
            "any_optimizer": True,
        }  # fmt: skip


def started(
    operation: Operation, state: Path, environment: dict[str, str], also: int = 0
) -> list[list[dict[str, str]]]:
    """Run `1 + also` concurrent launches with `WRITE_ENVIRONMENT` as the training; return their processes' environments."""
    state.mkdir(exist_ok=True)
    (state / "write.py").write_text(WRITE_ENVIRONMENT, encoding="utf-8")
    write_launch_files(operation, state, cpu=True)
    *words, last = command(operation, state / "job.json", state, sys.executable)
    launches = []
    for number in range(1 + also):
        script = f"{state / 'write.py'} {state / f'environment{number}'}"
        if operation.nodes > 1:
            # A node's command is a single shell line.
            launch = [*words, last[: last.index("--module")] + script]
        else:
            launch = [*words[: words.index("--module")], *script.split()]
        launches.append(
            subprocess.Popen(launch, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
    environments = []
    for number, process in enumerate(launches):
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0, output[-3000:]
        ranks = [state / f"environment{number}.{rank}" for rank in range(operation.processes)]
        environments.append([json.loads(rank.read_text(encoding="utf-8")) for rank in ranks])
    return environments


@pytest.mark.slow
def test_two_launches_at_once_meet_at_different_ports(tmp_path):
    first, second = started(Operation(gpus=2), tmp_path / "state", os.environ | {"OMP_NUM_THREADS": "1"}, also=1)
    ports = [{one["MASTER_PORT"] for one in launch} for launch in (first, second)]
    assert len(ports[0]) == len(ports[1]) == 1
    assert ports[0] != ports[1]
    for launch in (first, second):
        assert [one["RANK"] for one in launch] == ["0", "1"]
        assert {one["MASTER_ADDR"] for one in launch} == {"127.0.0.1"}
        assert {one["OMP_NUM_THREADS"] for one in launch} == {"1"}


# A stand-in for srun on one machine: runs the command once per node, with SLURM's variables for job and node.
SRUN = """#!/bin/bash
echo "$*" > "$(dirname "$0")/called"
nodes=${1#--nodes=}
while [[ $1 == --* ]]; do shift; done
for ((node = 0; node < nodes; node++)); do
    SLURM_NODEID=$node SLURM_LAUNCH_NODE_IPADDR=127.0.0.1 SLURM_JOB_ID=4021 "$@" & steps+=($!)
done
for step in "${steps[@]}"; do wait "$step" || exit 1; done
"""


@pytest.mark.slow
def test_nodes_rendezvous_by_slurm_variables_and_get_no_sharding_settings(tmp_path):
    """The trainer shards the model itself."""
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "srun").write_text(SRUN, encoding="utf-8")
    (tools / "srun").chmod(0o755)
    environment = os.environ | {"PATH": f"{tools}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    (environments,) = started(Operation(gpus=2, nodes=2, launch="fsdp"), tmp_path / "state", environment)
    assert [one["RANK"] for one in environments] == ["0", "1", "2", "3"]
    assert [one["LOCAL_RANK"] for one in environments] == ["0", "1", "0", "1"]
    assert {(one["WORLD_SIZE"], one["MASTER_ADDR"], one["MASTER_PORT"]) for one in environments} == {
        ("4", "127.0.0.1", "14021")
    }
    assert not [one for one in environments if "ACCELERATE_USE_FSDP" in one]
    called = (tools / "called").read_text(encoding="utf-8")
    assert called.startswith("--nodes=2 --ntasks=2 --ntasks-per-node=1 --kill-on-bad-exit=1 ")


def test_a_single_process_is_started_without_accelerate(tmp_path):
    words = command(Operation(gpus=1), Path("job.json"), tmp_path, "python")
    assert words == ["python", "-m", "snaketune.training.launch.worker", "job.json", str(tmp_path)]


@pytest.mark.slow
def test_accelerate_passes_deepspeed_its_config(with_deepspeed, tmp_path):
    ((only,),) = started(Operation(gpus=1, launch="deepspeed", zero_stage=3), tmp_path / "state", with_deepspeed)
    assert only["ACCELERATE_USE_DEEPSPEED"] == "true"
    config = Path(only["ACCELERATE_DEEPSPEED_CONFIG_FILE"])
    assert json.loads(config.read_text(encoding="utf-8"))["zero_optimization"]["stage"] == 3
    # accelerate refuses settings that are in both files.
    assert not {"mixed_precision", "zero_stage"} & set(only["ACCELERATE_CONFIG_DS_FIELDS"].split(","))


def test_nodes_count_all_processes():
    config = accelerate_config(Operation(gpus=8, nodes=2, launch="fsdp"), Path("S"), cpu=False)
    assert (config["num_machines"], config["num_processes"]) == (2, 16)


@pytest.mark.parametrize("zero_stage", [2, 3])
def test_deepspeeds_settings_are_in_its_own_file_alone(tmp_path, zero_stage):
    """accelerate refuses settings that are in both files."""
    write_launch_files(Operation(gpus=2, launch="deepspeed", zero_stage=zero_stage), tmp_path, cpu=False)
    config = yaml.safe_load((tmp_path / ACCELERATE_FILE).read_text(encoding="utf-8"))
    assert config["distributed_type"] == "DEEPSPEED"
    assert not {"mixed_precision", "zero_stage"} & config["deepspeed_config"].keys()
    written = json.loads(Path(config["deepspeed_config"]["deepspeed_config_file"]).read_text(encoding="utf-8"))
    assert written["zero_optimization"]["stage"] == zero_stage
    sizes = [name for name, value in written["zero_optimization"].items() if value == "auto"]
    assert len(sizes) == (3 if zero_stage == 3 else 0)
