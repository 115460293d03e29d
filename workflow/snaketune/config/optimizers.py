"""The values of `training.optimizer`: all optimizer names of transformers, with the reason for those that aren't supported.

This is a table because reading a config must not import transformers or torch. A test checks that it equals transformers'
OptimizerNames, and that training, killing and resuming works with every supported optimizer.
"""

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """Properties of an optimizer.

    Attributes:
        package: required package besides torch and transformers; its version shapes the result.
        betas: whether it uses `training.betas`.
        states: number of state values per trained parameter.
        bits: bits per state value.
        factored: whether the second moment of a matrix is stored as sums over rows and columns.
        paged: whether its states can move to host memory, on CUDA only.
        sharding: the sharding launches (`fsdp`, `deepspeed`) with which it steps as in a single process. That requires an
            elementwise update: DeepSpeed flattens weights, so Adafactor sees no matrices and blocks of 8-bit states are aligned
            differently; bitsandbytes can't compute on torch's shards.
        refused: the reason if it isn't supported.
    """

    package: str | None = None
    betas: bool = True
    states: int = 2
    bits: int = 32
    factored: bool = False
    paged: bool = False
    sharding: tuple[str, ...] = ()
    refused: str | None = None

    @property
    def for_gpus(self) -> bool:
        """Whether its purpose is to save GPU memory: 8-bit or paged states."""
        return self.bits < 32 or self.paged


_XLA, _NPU = (
    Optimizer(refused=f"it runs only on {device}, and snaketune trains on CUDA, MPS or the CPU")
    for device in ("XLA devices", "Ascend NPUs")
)
_TORCHAO = Optimizer(
    refused="checkpoints can't store torchao's quantized states exactly; adamw_8bit also has 8-bit states, and resumes"
)
_LOW_RANK = Optimizer(
    refused="it needs optim_target_modules, which snaketune doesn't pass; `lora` and paged_adamw_8bit save memory as well"
)
_LAYERWISE = Optimizer(
    refused="it updates weights in the backward pass, so there is no batch of several micro-batches, no max_grad_norm, and no "
    "state to resume from; adafactor and paged_adamw_8bit save memory as well"
)
_SCHEDULE_FREE = Optimizer(
    refused="the weights to save are averages that the model has only in the optimizer's eval mode, and transformers doesn't "
    "switch to it for saving; adamw_torch_fused with schedule warmup_stable_decay is the nearest alternative"
)

_ALL_SHARDING = ("fsdp", "deepspeed")

OPTIMIZERS: dict[str, Optimizer] = {
    "adamw_torch": Optimizer(sharding=_ALL_SHARDING),
    "adamw_torch_fused": Optimizer(sharding=_ALL_SHARDING),
    "adafactor": Optimizer(betas=False, states=1, factored=True),
    "sgd": Optimizer(betas=False, states=0, sharding=_ALL_SHARDING),
    "adagrad": Optimizer(betas=False, states=1, sharding=("fsdp",)),
    "rmsprop": Optimizer(betas=False, states=1, sharding=_ALL_SHARDING),
    "adamw_8bit": Optimizer(package="bitsandbytes", bits=8),
    "adamw_bnb_8bit": Optimizer(package="bitsandbytes", bits=8),
    "ademamix": Optimizer(package="bitsandbytes", states=3),
    "ademamix_8bit": Optimizer(package="bitsandbytes", states=3, bits=8),
    "lion_32bit": Optimizer(package="bitsandbytes", states=1),
    "lion_8bit": Optimizer(package="bitsandbytes", states=1, bits=8),
    "rmsprop_bnb": Optimizer(package="bitsandbytes", betas=False, states=1),
    "rmsprop_bnb_8bit": Optimizer(package="bitsandbytes", betas=False, states=1, bits=8),
    "rmsprop_bnb_32bit": Optimizer(package="bitsandbytes", betas=False, states=1),
    "paged_adamw_32bit": Optimizer(package="bitsandbytes", paged=True),
    "paged_adamw_8bit": Optimizer(package="bitsandbytes", bits=8, paged=True),
    "paged_ademamix_32bit": Optimizer(package="bitsandbytes", states=3, paged=True),
    "paged_ademamix_8bit": Optimizer(package="bitsandbytes", states=3, bits=8, paged=True),
    "paged_lion_32bit": Optimizer(package="bitsandbytes", states=1, paged=True),
    "paged_lion_8bit": Optimizer(package="bitsandbytes", states=1, bits=8, paged=True),
    "adamw_torch_xla": _XLA,
    "adamw_torch_npu_fused": _NPU,
    "adamw_anyprecision": Optimizer(refused="it needs torchdistx, which is unmaintained and has no build for torch 2"),
    "adamw_torch_4bit": _TORCHAO,
    "adamw_torch_8bit": _TORCHAO,
    "galore_adamw": _LOW_RANK,
    "galore_adamw_8bit": _LOW_RANK,
    "galore_adafactor": _LOW_RANK,
    "galore_adamw_layerwise": _LAYERWISE,
    "galore_adamw_8bit_layerwise": _LAYERWISE,
    "galore_adafactor_layerwise": _LAYERWISE,
    "apollo_adamw": _LOW_RANK,
    "apollo_adamw_layerwise": _LAYERWISE,
    "lomo": _LAYERWISE,
    "adalomo": _LAYERWISE,
    "grokadamw": Optimizer(
        refused="grokadamw stores its states in a parameter group, which checkpoints here can't store"
    ),
    "schedule_free_radam": _SCHEDULE_FREE,
    "schedule_free_adamw": _SCHEDULE_FREE,
    "schedule_free_sgd": _SCHEDULE_FREE,
    "stable_adamw": Optimizer(refused="torch-optimi counts steps in a tensor that checkpoints here can't store"),
}

OptimizerName = Literal[tuple(name for name, optimizer in OPTIMIZERS.items() if not optimizer.refused)]


def check_optimizer(name: object) -> None:
    """Raise ValueError with the reason if `name` is an optimizer that isn't supported."""
    if isinstance(name, str) and name in OPTIMIZERS and (reason := OPTIMIZERS[name].refused):
        raise ValueError(f"{name!r} isn't supported: {reason}")


def check_sharding(name: str, launch: str) -> None:
    """Raise ValueError if optimizer `name` doesn't work with a model that `launch` shards among processes."""
    if launch in _ALL_SHARDING and launch not in OPTIMIZERS[name].sharding:
        fit = ", ".join(known for known, optimizer in OPTIMIZERS.items() if launch in optimizer.sharding)
        raise ValueError(
            f"training.optimizer: {name} doesn't work with models sharded by {launch}; expected one of {fit}"
        )


def missing_package(name: str) -> str | None:
    """An error message if an optimizer needs a package that isn't installed, else None.

    Without torch, trainings run in another environment (`--sdm conda`), which can't be checked here.
    """
    package = OPTIMIZERS[name].package
    if not package or find_spec(package) or not find_spec("torch"):
        return None
    return f"{name!r} needs {package}, which isn't installed: pip install {package}"
