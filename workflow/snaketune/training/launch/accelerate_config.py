"""The config files of `accelerate launch` and DeepSpeed for a training."""

from pathlib import Path
from typing import Any

import yaml

from snaketune.config.operation import Operation
from snaketune.files import write_json
from snaketune.stages.host.launch_command import ACCELERATE_FILE, DEEPSPEED_FILE


def write_launch_files(operation: Operation, state: Path, *, cpu: bool) -> None:
    """Write `accelerate.yaml`, and for DeepSpeed `deepspeed.json`, into `state`."""
    config = accelerate_config(operation, state, cpu=cpu)
    (state / ACCELERATE_FILE).write_text(yaml.safe_dump(config), encoding="utf-8")
    if operation.launch == "deepspeed":
        write_json(state / DEEPSPEED_FILE, deepspeed_config(operation.zero_stage))


def accelerate_config(operation: Operation, state: Path, *, cpu: bool) -> dict[str, Any]:
    """Return the content of accelerate's config file. Node rank and rendezvous address are on its command line instead;
    precision is chosen by the Trainer, by what the device supports."""
    # MULTI_GPU on the CPU too: accelerate's MULTI_CPU means processes started by mpirun, and the Trainer takes gloo where
    # `use_cpu` is set. For fsdp too: accelerate only starts the processes and the trainer shards the model
    # (engine.fsdp), since accelerate's own FSDP silently falls back to DDP on a CPU.
    config = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "MULTI_GPU",
        "num_machines": operation.nodes,
        "num_processes": operation.processes,
        "use_cpu": cpu,
        "rdzv_backend": "static",
        "same_network": True,
        "main_process_port": 0,
        "debug": False,
    }
    if operation.launch != "deepspeed":
        return config
    deepspeed = {
        "deepspeed_config_file": str(state / DEEPSPEED_FILE),
        # accelerate is started on each node, rather than on the first one with ssh to the others.
        "deepspeed_multinode_launcher": "standard",
        "zero3_init_flag": False,
    }
    return config | {"distributed_type": "DEEPSPEED", "deepspeed_config": deepspeed}


def deepspeed_config(zero_stage: int) -> dict[str, Any]:
    """Return DeepSpeed's config. The Trainer fills in each `auto` from its arguments, which come from the spec."""
    zero = {"stage": zero_stage, "overlap_comm": True, "contiguous_gradients": True}
    if zero_stage == 3:
        # Bucket sizes depend on the model's hidden size. Weights are gathered when they are saved.
        sizes = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
        zero |= dict.fromkeys(sizes, "auto") | {"stage3_gather_16bit_weights_on_model_save": True}
    return {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "zero_optimization": zero,
        # The optimizer is the configured one, as in every other training.
        "zero_allow_untested_optimizer": True,
    }
