"""The values of `training.optimizer` and `training.schedule`: all names of transformers, with the reason for those that aren't
supported, torch's Muon, and the options of schedules.

These are tables because reading a config must not import transformers or torch. Tests check that they equal transformers'
OptimizerNames, SchedulerType and the signatures of its functions, and that training, killing and resuming works with every
supported optimizer.
"""

from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, ValidationInfo

from snaketune.config.base import Fraction, PositiveFloat, PositiveInt
from snaketune.suggestions import unknown

Curve = Literal["linear", "cosine", "1-sqrt"]
# Default of `lr_end` in transformers.
POLYNOMIAL_END = 1e-7
SHARDING = ("fsdp", "deepspeed")
# torch's, which transformers doesn't have.
MUON = "muon"


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """Properties of an optimizer.

    It steps with a sharding launch as in a single process only if its update is elementwise: DeepSpeed flattens weights, so
    Adafactor sees no matrices and blocks of 8-bit states are aligned differently; bitsandbytes can't compute on torch's shards.
    """

    package: str | None = None  # required besides torch and transformers; its version shapes the result
    betas: bool = True  # whether it uses `training.betas`
    states: int = 2  # state values per trained parameter
    matrix_states: int | None = None  # those of a linear layer's, if they are others
    bits: int = 32  # per state value
    factored: bool = False  # whether the second moment of a matrix is stored as sums over rows and columns
    paged: bool = False  # whether its states can move to host memory, on CUDA only
    sharding: tuple[str, ...] = ()  # the sharding launches (`fsdp`, `deepspeed`) with which it works
    refused: str | None = None  # the reason if it isn't supported

    @property
    def for_gpus(self) -> bool:
        """Whether its purpose is to save GPU memory: 8-bit or paged states."""
        return self.bits < 32 or self.paged


def _bitsandbytes(**properties: Any) -> Optimizer:
    return Optimizer(package="bitsandbytes", **properties)


# Names of optimizers that aren't supported, and the reason.
_REFUSED = {
    "adamw_torch_xla": "it runs only on XLA devices, and snaketune trains on CUDA, MPS or the CPU",
    "adamw_torch_npu_fused": "it runs only on Ascend NPUs, and snaketune trains on CUDA, MPS or the CPU",
    "adamw_anyprecision": "it needs torchdistx, which is unmaintained and has no build for torch 2",
    "adamw_torch_4bit adamw_torch_8bit":
        "checkpoints can't store torchao's quantized states exactly; adamw_8bit also has 8-bit states, and resumes",
    "galore_adamw galore_adamw_8bit galore_adafactor apollo_adamw":
        "it needs optim_target_modules, which snaketune doesn't pass; `lora` and paged_adamw_8bit save memory as well",
    "galore_adamw_layerwise galore_adamw_8bit_layerwise galore_adafactor_layerwise apollo_adamw_layerwise lomo adalomo":
        "it updates weights in the backward pass, so there is no batch of several micro-batches, no max_grad_norm, and no "
        "state to resume from; adafactor and paged_adamw_8bit save memory as well",
    "grokadamw": "grokadamw stores its states in a parameter group, which checkpoints here can't store",
    "schedule_free_radam schedule_free_adamw schedule_free_sgd":
        "the weights to save are averages that the model has only in the optimizer's eval mode, and transformers doesn't "
        "switch to it for saving; adamw_torch_fused with schedule warmup_stable_decay is the nearest alternative",
    "stable_adamw": "torch-optimi counts steps in a tensor that checkpoints here can't store",
}  # fmt: skip
OPTIMIZERS: dict[str, Optimizer] = {
    "adamw_torch": Optimizer(sharding=SHARDING),
    "adamw_torch_fused": Optimizer(sharding=SHARDING),
    "adafactor": Optimizer(betas=False, states=1, factored=True),
    "sgd": Optimizer(betas=False, states=0, sharding=SHARDING),
    "adagrad": Optimizer(betas=False, states=1, sharding=("fsdp",)),
    "rmsprop": Optimizer(betas=False, states=1, sharding=SHARDING),
    # Its states are one number per parameter of a matrix, and two of the others, which AdamW trains.
    MUON: Optimizer(matrix_states=1),
    "adamw_8bit": _bitsandbytes(bits=8),
    "adamw_bnb_8bit": _bitsandbytes(bits=8),
    "ademamix": _bitsandbytes(states=3),
    "ademamix_8bit": _bitsandbytes(states=3, bits=8),
    "lion_32bit": _bitsandbytes(states=1),
    "lion_8bit": _bitsandbytes(states=1, bits=8),
    "rmsprop_bnb": _bitsandbytes(betas=False, states=1),
    "rmsprop_bnb_8bit": _bitsandbytes(betas=False, states=1, bits=8),
    "rmsprop_bnb_32bit": _bitsandbytes(betas=False, states=1),
    "paged_adamw_32bit": _bitsandbytes(paged=True),
    "paged_adamw_8bit": _bitsandbytes(bits=8, paged=True),
    "paged_ademamix_32bit": _bitsandbytes(states=3, paged=True),
    "paged_ademamix_8bit": _bitsandbytes(states=3, bits=8, paged=True),
    "paged_lion_32bit": _bitsandbytes(states=1, paged=True),
    "paged_lion_8bit": _bitsandbytes(states=1, bits=8, paged=True),
    **{name: Optimizer(refused=reason) for names, reason in _REFUSED.items() for name in names.split()},
}
# pyrefly: ignore[invalid-literal]
OptimizerName = Literal[tuple(name for name, optimizer in OPTIMIZERS.items() if not optimizer.refused)]


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Properties of a schedule."""

    options: dict[str, Any] = field(default_factory=dict)  # types of its options, by name
    needs: tuple[str, ...] = ()  # options of which exactly one is required
    warms_up: bool = True  # whether it uses `training.warmup_fraction`
    refused: str | None = None  # the reason if it isn't supported


_METRIC = Schedule(refused="it needs a metric on held-out rows, and trainings here don't evaluate while they run")
_FLOOR = {"num_cycles": PositiveFloat, "min_lr": PositiveFloat, "min_lr_rate": Fraction}
_DECAY = {"num_decay_steps": PositiveInt, "num_stable_steps": PositiveInt, "warmup_type": Curve, "decay_type": Curve}
_DECAY |= {"min_lr_ratio": Fraction, "num_cycles": PositiveFloat}
SCHEDULES: dict[str, Schedule] = {
    "linear": Schedule(),
    "cosine": Schedule(options={"num_cycles": PositiveFloat}),
    "cosine_with_restarts": Schedule(options={"num_cycles": PositiveInt}),
    "polynomial": Schedule(options={"lr_end": Annotated[float, Field(ge=0)], "power": PositiveFloat}),
    "constant": Schedule(warms_up=False),
    "constant_with_warmup": Schedule(),
    "inverse_sqrt": Schedule(options={"timescale": PositiveInt}),
    "reduce_lr_on_plateau": _METRIC,
    "cosine_with_min_lr": Schedule(options=_FLOOR, needs=("min_lr", "min_lr_rate")),
    "cosine_warmup_with_min_lr": Schedule(
        options=_FLOOR | {"warmup_lr_rate": Fraction}, needs=("min_lr", "min_lr_rate")
    ),
    "warmup_stable_decay": Schedule(options=_DECAY, needs=("num_decay_steps",)),
    "greedy": _METRIC,
}
# pyrefly: ignore[invalid-literal]
ScheduleName = Literal[tuple(name for name, schedule in SCHEDULES.items() if not schedule.refused)]


def check_supported(name: Any, info: ValidationInfo) -> Any:
    """The name of an optimizer or schedule; ValueError with the reason if it is a known one that isn't supported."""
    known = (
        {"optimizer": OPTIMIZERS, "schedule": SCHEDULES}[str(info.field_name)].get(name)
        if isinstance(name, str)
        else None
    )
    if known and known.refused:
        raise ValueError(f"{name!r} isn't supported: {known.refused}")
    return name


def check_sharding(name: str, launch: str) -> None:
    """Raise ValueError if optimizer `name` doesn't work with a model that `launch` shards among processes."""
    if launch in SHARDING and launch not in OPTIMIZERS[name].sharding:
        fit = ", ".join(known for known, optimizer in OPTIMIZERS.items() if launch in optimizer.sharding)
        raise ValueError(
            f"training.optimizer: {name} doesn't work with models sharded by {launch}; expected one of {fit}"
        )


def missing_package(name: str) -> str | None:
    """An error message if an optimizer needs a package that isn't installed, else None."""
    package = OPTIMIZERS[name].package
    # Without torch, trainings run in another environment (`--sdm conda`), which can't be checked here.
    if not package or find_spec(package) or not find_spec("torch"):
        return None
    return f"{name!r} needs {package}, which isn't installed: pip install {package}"


def checked_options(name: str, options: dict[str, Any], learning_rate: float) -> dict[str, Any]:
    """Convert the options of a schedule to their types; ValueError if one is unknown, invalid or missing, if alternatives are
    given together, or if the final learning rate isn't below the highest one."""
    known = SCHEDULES[name]
    checked = {option: _checked_option(name, option, value) for option, value in options.items()}
    alternatives = [option for option in known.needs if option in options]
    if known.needs and len(alternatives) != 1:
        raise ValueError(
            f"schedule {name} needs {' or '.join(known.needs)}; found {' and '.join(alternatives) or 'none'}"
        )
    end = checked.get("min_lr", checked.get("lr_end", POLYNOMIAL_END if name == "polynomial" else 0.0))
    if end >= learning_rate:
        raise ValueError(f"schedule {name} falls to {end:g}, which isn't below learning_rate {learning_rate:g}")
    return checked


def _checked_option(name: str, option: str, value: Any) -> Any:
    known = SCHEDULES[name].options
    if not known:
        raise ValueError(f"schedule {name} has no options; found {option!r}")
    if option not in known:
        raise ValueError(f"schedule {name} has no option {option!r}{unknown(option, known)}")
    try:
        # YAML reads yes, on and true as booleans, which pydantic would convert to 1.
        option_type = TypeAdapter(known[option], config=ConfigDict(allow_inf_nan=False))
        return option_type.validate_python(str(value) if isinstance(value, bool) else value)
    except ValidationError as error:
        message = error.errors()[0]["msg"]
        raise ValueError(f"{option}: found {value!r}; {message[:1].lower()}{message[1:]}") from None
