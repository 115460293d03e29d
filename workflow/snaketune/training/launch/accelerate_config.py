"""What `accelerate launch` is told of a training: its own config file, and DeepSpeed's."""

from pathlib import Path
from typing import Any

import yaml

from snaketune.artifacts.manifest import write_json
from snaketune.config.operation import Operation
from snaketune.stages.host.launch_command import ACCELERATE_FILE, DEEPSPEED_FILE

# As accelerate calls them. On the CPU too: there MULTI_CPU stands for processes that mpirun starts, and the Trainer takes gloo
# wherever it is told to use the CPU.
# Under fsdp too accelerate only starts the processes: the trainer shards the model itself (training.parallel.fsdp), since
# accelerate's FSDP would on a CPU be DDP without a word.
DISTRIBUTED_TYPE = {"ddp": "MULTI_GPU", "fsdp": "MULTI_GPU", "deepspeed": "DEEPSPEED"}


def write_launch_files(operation: Operation, state: Path, *, cpu: bool) -> None:
    """Write `accelerate.yaml`, and for DeepSpeed `deepspeed.json`, into `state`."""
    told = accelerate_config(operation, state, cpu=cpu)
    (state / ACCELERATE_FILE).write_text(yaml.safe_dump(told), encoding="utf-8")
    if operation.launch == "deepspeed":
        write_json(state / DEEPSPEED_FILE, deepspeed_config(operation.zero_stage))


def accelerate_config(operation: Operation, state: Path, *, cpu: bool) -> dict[str, Any]:
    """accelerate's config file. Of a node's rank and of where nodes meet, its command line tells.

    Precision isn't in it: the Trainer decides it, by what the device can.
    """
    told = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": DISTRIBUTED_TYPE[operation.launch],
        "num_machines": operation.nodes,
        "num_processes": operation.processes,
        "use_cpu": cpu,
        "rdzv_backend": "static",
        "same_network": True,
        "main_process_port": 0,
        "debug": False,
    }
    if operation.launch == "deepspeed":
        told["deepspeed_config"] = {
            "deepspeed_config_file": str(state / DEEPSPEED_FILE),
            # Started by accelerate on each node, and not from the first one over ssh.
            "deepspeed_multinode_launcher": "standard",
            "zero3_init_flag": False,
        }
    return told


def deepspeed_config(zero_stage: int) -> dict[str, Any]:
    """DeepSpeed's own config. What is `auto` here the Trainer fills in from its arguments, which come of the spec."""
    zero = {"stage": zero_stage, "overlap_comm": True, "contiguous_gradients": True}
    if zero_stage == 3:
        # Bucket sizes by the model's width; weights are written whole, and not as a shard of each process.
        zero |= {
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
            "stage3_gather_16bit_weights_on_model_save": True,
        }
    return {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "zero_optimization": zero,
        # The optimizer is the config's own, as in every other training.
        "zero_allow_untested_optimizer": True,
    }
