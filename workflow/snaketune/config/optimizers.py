"""Which optimizers `training.optimizer` may name: all that transformers names, and for those that can't be had here, why.

A table, because neither transformers nor torch may be imported where a config is read; a test holds it equal to transformers'
OptimizerNames, and trains, kills and resumes with each one that isn't refused.
"""

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """What is known of an optimizer.

    Attributes:
        package: that must be importable besides torch and transformers, and whose version shapes the result.
        betas: whether it reads `training.betas`.
        states: how many numbers it keeps of each one that is trained.
        bits: of such a number.
        factored: of a matrix it keeps sums of rows and of columns in their place.
        paged: its states may move to the host's memory, on CUDA alone.
        shared: launches that share a model out and step with it as one process does. It must see each number alone: DeepSpeed
            lays weights end to end, where Adafactor finds no matrices and blocks of 8-bit states begin elsewhere; bitsandbytes
            can't compute on torch's shards.
        refused: why it can't be had.
    """

    package: str | None = None
    betas: bool = True
    states: int = 2
    bits: int = 32
    factored: bool = False
    paged: bool = False
    shared: tuple[str, ...] = ()
    refused: str | None = None

    @property
    def for_gpus(self) -> bool:
        """Whether it is there to save a GPU's memory."""
        return self.bits < 32 or self.paged


_XLA, _NPU = (
    Optimizer(refused=f"it runs on {device} alone, and snaketune trains on CUDA, MPS or the CPU")
    for device in ("XLA devices", "Ascend NPUs")
)
_TORCHAO = Optimizer(
    refused="a checkpoint can't hold torchao's quantized states exactly; adamw_8bit holds them in 8 bits too, and resumes"
)
_LOW_RANK = Optimizer(
    refused="it needs optim_target_modules, which snaketune doesn't pass; `lora` and paged_adamw_8bit save memory as well"
)
_LAYERWISE = Optimizer(
    refused="it updates weights in the backward pass, so there is no batch of several micro-batches, no max_grad_norm, and no "
    "state to resume from; adafactor and paged_adamw_8bit save memory as well"
)
_SCHEDULE_FREE = Optimizer(
    refused="the weights to keep are averages that the model holds in the optimizer's eval mode alone, and transformers "
    "doesn't switch to it to save; adamw_torch_fused with schedule warmup_stable_decay comes nearest"
)

_EVERYWHERE = ("fsdp", "deepspeed")

OPTIMIZERS: dict[str, Optimizer] = {
    "adamw_torch": Optimizer(shared=_EVERYWHERE),
    "adamw_torch_fused": Optimizer(shared=_EVERYWHERE),
    "adafactor": Optimizer(betas=False, states=1, factored=True),
    "sgd": Optimizer(betas=False, states=0, shared=_EVERYWHERE),
    "adagrad": Optimizer(betas=False, states=1, shared=("fsdp",)),
    "rmsprop": Optimizer(betas=False, states=1, shared=_EVERYWHERE),
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
    "adamw_anyprecision": Optimizer(refused="it needs torchdistx, which was given up and has no build for torch 2"),
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
    "grokadamw": Optimizer(refused="grokadamw keeps its states where no checkpoint finds them, so it can't be resumed"),
    "schedule_free_radam": _SCHEDULE_FREE,
    "schedule_free_adamw": _SCHEDULE_FREE,
    "schedule_free_sgd": _SCHEDULE_FREE,
    "stable_adamw": Optimizer(refused="torch-optimi counts steps in a tensor that checkpoints here have no place for"),
}

OptimizerName = Literal[tuple(name for name, optimizer in OPTIMIZERS.items() if not optimizer.refused)]


def check_optimizer(name: object) -> None:
    """Raise ValueError with the reason if `name` is an optimizer that is refused."""
    if isinstance(name, str) and name in OPTIMIZERS and (reason := OPTIMIZERS[name].refused):
        raise ValueError(f"{name!r} can't be had: {reason}")


def check_shared(name: str, launch: str) -> None:
    """Raise ValueError if `name` can't step with a model that `launch` shares out among processes."""
    if launch in _EVERYWHERE and launch not in OPTIMIZERS[name].shared:
        fit = ", ".join(known for known, optimizer in OPTIMIZERS.items() if launch in optimizer.shared)
        raise ValueError(f"training.optimizer: {name} can't step with what {launch} shares out; expected one of {fit}")


def missing_package(name: str) -> str | None:
    """What to say if an optimizer needs a package that isn't there.

    Where torch isn't there either, trainings run in another environment (`--sdm conda`), of which nothing can be said here.
    """
    package = OPTIMIZERS[name].package
    if not package or find_spec(package) or not find_spec("torch"):
        return None
    return f"{name!r} needs {package}, which isn't installed: pip install {package}"
