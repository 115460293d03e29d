"""`operation:`, and what else says how a training runs and not what comes out."""

from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from snaketune.config.base import Model, PositiveInt

MicroBatchRows = Literal["auto"] | PositiveInt
GradientCheckpointing = Literal["auto"] | bool
Launch = Literal["single", "ddp", "fsdp", "deepspeed"]
ZeroStage = Annotated[int, Field(ge=2, le=3)]


class Operation(Model):
    """How a training runs, not what comes out: editing these reruns nothing."""

    gpus: Annotated[int, Field(ge=0)] = 1
    """GPUs of the job on each of its nodes, with a process for each; where there is none, one process computes on the CPU, and
    several do if `allow_cpu` says so. 0 is one process on the CPU."""
    nodes: PositiveInt = 1
    """Machines that train together. More than one need SLURM (`profiles/slurm`)."""
    launch: Annotated[Launch | None, Field(validate_default=True)] = None
    """How processes share the work: under `ddp` each has the whole model, under `fsdp` (FSDP2) and `deepspeed` (ZeRO) a part.
    Default: `ddp` for several processes, `single` for one."""
    zero_stage: Annotated[ZeroStage | None, Field(validate_default=True)] = None
    """What DeepSpeed shards: optimizer states and gradients (2, the default of `launch: deepspeed`), or the weights too (3)."""
    allow_cpu: bool = False
    """Trains on the CPU what is refused without a GPU: 4-bit weights, optimizers in 8 bits or with pages, several `gpus` or
    `nodes`, and what would take more than two days."""
    checkpoint_steps: PositiveInt = 200
    """Optimizer steps between checkpoints."""
    log_steps: PositiveInt = 10
    """Optimizer steps between lines of the log and points of the curves, each a mean over them; each checkpoint has a line
    too, so that a resumed training has the same ones."""
    load_in_memory: Literal["auto"] | bool = "auto"
    """Reads all rows before training instead of mapping their files; `auto` does where mapping is slow (network mounts,
    Windows disks under WSL)."""

    @property
    def processes_per_node(self) -> int:
        """One for each GPU; one where there are none."""
        return max(1, self.gpus)

    @property
    def processes(self) -> int:
        """All that train together."""
        return self.nodes * self.processes_per_node

    @field_validator("launch")
    @classmethod
    def _fits_the_processes(cls, launch: Launch | None, info: ValidationInfo) -> Launch | None:
        gpus, nodes = info.data.get("gpus"), info.data.get("nodes")
        # What these two lack is told already.
        if gpus is None or nodes is None:
            return launch
        processes = nodes * max(1, gpus)
        if launch == "single" and processes > 1:
            raise ValueError(
                f"single is one process, but gpus: {gpus} on nodes: {nodes} are {processes}; expected ddp, fsdp or deepspeed, "
                "or gpus: 1 and nodes: 1"
            )
        return launch or ("ddp" if processes > 1 else "single")

    @field_validator("zero_stage")
    @classmethod
    def _belongs_to_deepspeed(cls, stage: ZeroStage | None, info: ValidationInfo) -> ZeroStage | None:
        if "launch" not in info.data:
            return stage
        if stage is not None and info.data["launch"] != "deepspeed":
            raise ValueError(
                f"{stage} says nothing to launch: {info.data['launch']}; expected launch: deepspeed, or leave it out"
            )
        return 2 if stage is None and info.data["launch"] == "deepspeed" else stage


class Execution(Operation):
    """How a job runs: `operation`, and what else of a run's config says how and not what."""

    micro_batch_rows: MicroBatchRows = "auto"
    """As in `training`."""
    gradient_checkpointing: GradientCheckpointing = "auto"
    """As in `training`."""
    preflight: str = ""
    """Manifest of what was found before any training; empty where nobody looked."""
    calibration: str = ""
    """Manifest of the curve that `auto` goes by; empty where there is none."""
    share_kernels: bool = False
    """As in `dpo.reference_pass`."""
    parts: str | None = None
    """Pattern of the manifests of a reference pass' parts, such as `results/ref_pass/x/*-of-4/manifest.json`; none where there
    are none."""
