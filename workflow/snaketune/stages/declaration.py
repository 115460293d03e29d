"""What a stage declares of itself: `STAGE = Stage(...)` at the top of its module, beside its `build`.

Planning, rules, command line, estimates and report follow from the declarations, which `stages.table` finds. To read one, its
module is imported, so the module imports nothing heavy at its top (no numpy, pyarrow or torch): `build` does when it is called.
A declaration is no part of the code digest (`stages.cache.syntax`), so an edit of a cost or a group reruns nothing.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from snaketune.artifacts.manifest import Artifact
from snaketune.config.base import Model
from snaketune.stages.cache.libraries import Inputs, always

if TYPE_CHECKING:
    from snaketune.config.workflow import Workflow
    from snaketune.stages.job import Job

# Keys of `Execution`: where a stage in launched processes computes, and in which micro-batches.
DEVICES = ("gpus", "nodes", "launch", "zero_stage", "allow_cpu")
TRAINING = (
    *DEVICES,
    "checkpoint_steps",
    "log_steps",
    "load_in_memory",
    "preflight",
    "micro_batch_rows",
    "gradient_checkpointing",
    "calibration",
)
# Of a forward pass over reference log-probabilities.
PASS = ("gpus", "allow_cpu", "share_kernels")


@dataclass(frozen=True, kw_only=True)
class Input:
    """A role that results of other stages fill.

    Attributes:
        stages: those that may fill it.
        many: whether any number of results fills it, and not exactly one.
    """

    stages: tuple[str, ...]
    many: bool = False


def exactly_one(*stages: str) -> Input:
    """A role that exactly one result fills."""
    return Input(stages=stages)


def any_number(*stages: str) -> Input:
    """A role that any number of results fills."""
    return Input(stages=stages, many=True)


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Memory, time and CPUs of a job that reads texts, or weights as a file; measured on the demo and on gsm8k, with a margin.

    Attributes:
        mb, minutes: whatever it reads.
        mb_per_gb, minutes_per_gb: and for each GB of text.
        bytes_per_parameter, minutes_per_billion: and for the parameters of its model.
    """

    mb: int = 800
    mb_per_gb: int = 0
    minutes: int = 3
    minutes_per_gb: int = 0
    threads: int = 1
    bytes_per_parameter: int = 0
    minutes_per_billion: int = 0


@dataclass(frozen=True, kw_only=True)
class ModelCost:
    """Memory, time and CPUs of a job that computes with a model: by its parameters and by the tokens of its packs.

    Attributes:
        flops: per parameter and token: 2 forward, 6 forward and backward, 0 where the time doesn't depend on the tokens.
    """

    flops: int


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage.

    Attributes:
        module: its module, `__name__`, which has its `build(spec, work, **inputs)`; its last name is the stage's.
        spec: the model of its spec.
        payload: the folder beside its manifest that holds what it makes.
        job_name: the folder of one of its jobs below `results/<stage>/`, as a pattern of wildcards.
        inputs: by role, which results it reads.
        files: roles filled by files from outside.
        libraries: distributions whose version shapes the result, by its spec and artifacts.
        cost: what a job takes, or a function that says it of a job's spec.
        group: with which others its jobs are sent to a cluster as one where all are short (`cluster.groups`).
        array: whether its jobs are one array of a cluster, and so ask alike.
        in_report: whether the report reads its results; what was measured before a training is in that one's run.json.
        jobs: for a stage whose jobs follow from those of others: its jobs, by the config and the jobs planned so far.
        operation: keys of `Execution` that it goes by; a launched `build` takes them.
        launcher: the module whose `launch` runs `build` in processes of its own, one per GPU.
        takes_operation: whether `build` takes the operation though nothing is launched.
        measures: whether its result is a measurement of one machine and moment: where it runs again, it is made again.
        digested_by: by role, the entry of an input's manifest that is digested in the place of its content.
        key_module: the module whose `keys` returns the cache keys of a job on the machine that it runs on; without one, the
            whole spec is in the key.
        transitive: roles whose results another input was made from, so that Snakemake needn't wait for them: of parts that
            each read all parts there is the square of edges.
        link: name of a link beside the stages' folders, to the payload that its manifest names there.
    """

    module: str
    spec: type[Model]
    payload: str
    job_name: str = "{name}"
    inputs: dict[str, Input] = field(default_factory=dict)
    files: tuple[str, ...] = ()
    libraries: Callable[[Any, Inputs], tuple[str, ...]] = always()
    cost: Cost | ModelCost | Callable[[Any], Cost] = Cost()
    group: Literal["data", "models"] | None = None
    array: bool = False
    in_report: bool = False
    jobs: "Callable[[Workflow, Iterable[Job]], Iterable[Job]] | None" = None
    operation: tuple[str, ...] = ()
    launcher: str = ""
    takes_operation: bool = False
    measures: bool = False
    digested_by: dict[str, str] = field(default_factory=dict)
    key_module: str = ""
    transitive: tuple[str, ...] = ()
    link: str = ""

    @property
    def name(self) -> str:
        return self.module.rpartition(".")[2]

    @property
    def one(self) -> tuple[str, ...]:
        """Roles filled by exactly one result."""
        return tuple(role for role, taken in self.inputs.items() if not taken.many)

    @property
    def many(self) -> tuple[str, ...]:
        """Roles filled by any number of results."""
        return tuple(role for role, taken in self.inputs.items() if taken.many)

    def arguments(self, artifacts: dict[str, list[Artifact]], files: dict[str, list[Path]]) -> dict[str, Any]:
        """What `build` takes by role: one artifact, a list of them, or files."""
        many = {role: artifacts.get(role, []) for role in self.many}
        return {role: artifacts[role][0] for role in self.one} | many | files

    @property
    def reads_manifests(self) -> bool:
        """Whether it reads manifests of any stage as they are, counts and all."""
        return "manifests" in self.files

    @property
    def gpu(self) -> bool:
        """Whether it claims GPUs, and computes on the CPU where there are none."""
        return "gpus" in self.operation
