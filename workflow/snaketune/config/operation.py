"""The `operation:` section of a run, and other keys that change how a job runs but not its result."""

from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from snaketune.config.base import Model, PositiveInt
from snaketune.config.generation import Engine
from snaketune.config.held_out import Evaluate

MicroBatchRows = Literal["auto"] | PositiveInt
GradientCheckpointing = Literal["auto"] | bool
Launch = Literal["single", "ddp", "fsdp", "deepspeed"]
ZeroStage = Annotated[int, Field(ge=2, le=3)]


class Operation(Model):
    """Execution of a training: devices, processes, checkpoints, logging. Edits rerun nothing, as the result stays the same."""

    gpus: Annotated[int, Field(ge=0)] = 1
    """GPUs per node, with one process for each. Without a GPU, a single process runs on the CPU; several do only with
    `allow_cpu`. 0 runs one process on the CPU."""
    nodes: PositiveInt = 1
    """Number of machines. More than one requires SLURM (`profiles/slurm`)."""
    launch: Annotated[Launch | None, Field(validate_default=True)] = None
    """Parallelism: with `ddp` each process has the whole model; `fsdp` (FSDP2) and `deepspeed` (ZeRO) shard it. Default: `ddp`
    for several processes, `single` for one."""
    zero_stage: Annotated[ZeroStage | None, Field(validate_default=True)] = None
    """ZeRO stage of `launch: deepspeed`: 2 shards optimizer states and gradients (the default), 3 also the weights."""
    activation_offloading: Annotated[bool, Field(validate_default=True)] = False
    """Moves the activations that the backward pass needs to host memory and back, by TRL, beside the computation, where GPU
    memory limits the micro-batch or the row length. With `training.gradient_checkpointing: true` these are the inputs of the
    layers only. Has no effect on a CPU; not with `launch: deepspeed`."""
    allow_cpu: bool = False
    """Allows what is refused without a GPU: 4-bit weights, 8-bit and paged optimizers, several `gpus` or `nodes`, and trainings
    that are expected to take more than two days on the CPU."""
    checkpoint_steps: PositiveInt = 200
    """Optimizer steps between checkpoints."""
    log_steps: PositiveInt = 10
    """Optimizer steps between log lines and points of curves; metrics are means over these steps. Lines are also logged after
    the first and the last step, and when held-out rows are measured; a training that was interrupted and resumed logs the same
    lines."""
    load_in_memory: Literal["auto"] | bool = "auto"
    """Reads all rows into memory before training instead of memory-mapping the files; `auto` does on file systems where mapping
    is slow (network mounts, Windows disks under WSL)."""

    @property
    def processes_per_node(self) -> int:
        """Processes per node: one per GPU, and one without GPUs."""
        return max(1, self.gpus)

    @property
    def processes(self) -> int:
        """Number of processes on all nodes."""
        return self.nodes * self.processes_per_node

    @field_validator("launch")
    @classmethod
    def _fits_the_processes(cls, launch: Launch | None, info: ValidationInfo) -> Launch | None:
        # Errors of these two keys are reported already.
        if not {"gpus", "nodes"} <= info.data.keys():
            return launch
        gpus, nodes = info.data["gpus"], info.data["nodes"]
        processes = nodes * max(1, gpus)
        if launch == "single" and processes > 1:
            raise ValueError(
                f"single is one process, but gpus: {gpus} and nodes: {nodes} make {processes}; expected ddp, fsdp or "
                "deepspeed, or gpus: 1 and nodes: 1"
            )
        return launch or ("ddp" if processes > 1 else "single")

    @field_validator("zero_stage")
    @classmethod
    def _belongs_to_deepspeed(cls, stage: ZeroStage | None, info: ValidationInfo) -> ZeroStage | None:
        launch = info.data.get("launch", "deepspeed")
        if stage is not None and launch != "deepspeed":
            raise ValueError(
                f"{stage} has no effect with launch: {launch}; set launch: deepspeed, or remove zero_stage"
            )
        return 2 if stage is None and info.data.get("launch") == "deepspeed" else stage

    @field_validator("activation_offloading")
    @classmethod
    def _not_with_deepspeed(cls, offloads: bool, info: ValidationInfo) -> bool:
        if offloads and info.data.get("launch") == "deepspeed":
            raise ValueError("doesn't work with launch: deepspeed, which manages memory itself; use ddp or fsdp")
        return offloads


class Execution(Operation):
    """The execution settings of a job: `operation`, and the other keys of a run that don't change its result."""

    micro_batch_rows: MicroBatchRows = "auto"
    """`training.micro_batch_rows` of the run."""
    gradient_checkpointing: GradientCheckpointing = "auto"
    """`training.gradient_checkpointing` of the run."""
    evaluate: Evaluate | Literal[False] = False
    """`training.evaluate` of the run."""
    snapshots: tuple[float, ...] = ()
    """The shares of the run at which its snapshots end that it may resume from, ascending."""
    race: str = ""
    """Path of the manifest of the race that may pause the run; empty if there is none."""
    preflight: str = ""
    """Path of the preflight report's manifest; empty if there is none."""
    calibration: str = ""
    """Path of the calibration's manifest; empty if there is none. `micro_batch_rows: auto` uses it; fixed values are compared
    with it."""
    calibrated_epochs: float = 0.0
    """Epochs of the longest training that waits for a calibration, of whose time it takes a small share; 0 for no limit."""
    share_kernels: bool = False
    """`dpo.reference_pass.share_kernels` of the run."""
    parts: str | None = None
    """Pattern of the manifests of a job's parts, such as `results/ref_pass/x/*-of-4/manifest.json`; None if it isn't split."""
    engine: Engine = "transformers"
    """`operation.engine` of an evaluation."""
    sampled: str = ""
    """The model whose responses a selection reads, such as `dpo:demo`, for its messages."""
    vllm: str | None = None
    """`operation.vllm` of a sample or evaluation."""
