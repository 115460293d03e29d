"""The `teacher:` section."""

from typing import Annotated

from pydantic import Field

from snaketune.config.base import Model, TrainedModel
from snaketune.config.base_models import Pretrained
from snaketune.config.lora import Quantization
from snaketune.config.training_runs import Precision


class TeacherOperation(Model):
    """Execution of a teacher's pass. An edit reruns no finished result."""

    gpus: Annotated[int, Field(ge=0, le=16)] = 1
    """GPUs of each part, which share the model's layers if there are several (transformers' `device_map`); 0 computes on the
    CPU."""
    allow_cpu: bool = False
    """Allows 4-bit weights without a GPU."""
    parts: Annotated[int, Field(ge=1, le=128)] = 1
    """Number of parallel jobs that share the rows; their results are gathered into one."""


class Teacher(Model):
    """A model whose probabilities others are trained towards. They are computed once for each pack and temperature of the runs
    that name it under `distill`, and stored: for each supervised token the `k` most likely ones."""

    model: Pretrained | TrainedModel
    """`sft:NAME`, `dpo:NAME`, or `{path: ...}` of a pretrained model, of any architecture and size. Its tokenizer must give the
    runs' token ids the same texts."""
    k: Annotated[int, Field(ge=1, le=262144)] = 32
    """Tokens whose log-probabilities are stored for each supervised token: 6 bytes each, and those of all others together."""
    precision: Precision = "auto"
    """Data type of the computation, as `training.precision`."""
    quantization: Quantization | None = None
    """Loads the teacher in 4 bits."""
    operation: TeacherOperation = TeacherOperation()
