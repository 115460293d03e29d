"""The declaration of a stage: `STAGE = Stage(...)` at the top of its module, beside its `build`.

Planning, rules, command line, estimates and report follow from the declarations, which `stages.table` collects. It imports each
declaring module, so these import nothing heavy at their top (no numpy, pyarrow or torch); `build` does so when it is called.
The declaration isn't part of the code digest (`stages.cache.syntax`), so editing a cost or a group makes no result stale.
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

# Keys of `Execution`: the devices that a stage computes on, and what a training takes besides.
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
# Keys of `Execution` that a forward pass over reference log-probabilities takes.
PASS = ("gpus", "allow_cpu", "share_kernels")


@dataclass(frozen=True, kw_only=True)
class Input:
    """An input role, filled by results of other stages.

    Attributes:
        stages: the stages whose results may fill it.
        many: whether any number of results may fill it; otherwise exactly one does.
    """

    stages: tuple[str, ...]
    many: bool = False


def exactly_one(*stages: str) -> Input:
    """Return a role that exactly one result fills."""
    return Input(stages=stages)


def any_number(*stages: str) -> Input:
    """Return a role that any number of results may fill."""
    return Input(stages=stages, many=True)


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Memory, time and CPUs of a job that reads text, or weights as files; measured on the demo and on gsm8k, with a margin.

    Attributes:
        mb, minutes: fixed part.
        mb_per_gb, minutes_per_gb: added for each GB of text.
        bytes_per_parameter, minutes_per_billion: added for the parameters of its model.
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
    """Memory, time and CPUs of a job that computes with a model, from its parameters and the tokens of its packs.

    Attributes:
        flops: per parameter and token: 2 for a forward pass, 6 for forward and backward, 0 if time doesn't depend on tokens.
    """

    flops: int


@dataclass(frozen=True, kw_only=True)
class Stage:
    """The declaration of one stage.

    Attributes:
        module: `__name__` of the module that has `build(spec, work, **inputs)`; its last part is the name of the stage.
        spec: the model of its spec.
        payload: the name of the folder beside the manifest that holds the result's files.
        job_name: the folder of a job below `results/<stage>/`, as a pattern of wildcards.
        inputs: by role, the results that it reads.
        files: roles filled by external files.
        further_files: for a stage that reads manifests, the module whose `further_files` returns the paths of others by role.
        libraries: the distributions whose version shapes the result, from spec and artifacts.
        cost: the resources of a job, or a function of the job's spec that returns them.
        group: the group of short jobs that are sent to a cluster as one job (`cluster.groups`).
        array: whether its jobs are sent to a cluster as one array, and so request the same resources.
        in_report: whether the report reads its results. Measurements made before a training are in that training's run.json.
        jobs: for a stage whose jobs follow from those of others: returns its jobs, from the config and the jobs planned so far.
        operation: the keys of `Execution` that it uses; a launched `build` is given them.
        launcher: the module whose `launch` runs `build` in worker processes, one per GPU.
        takes_operation: whether `build` is given the operation though no processes are launched.
        measures: whether its result is a measurement of one machine at one time, so that a cached result isn't reused.
        digested_by: by role, the manifest entry that is digested instead of the input's content.
        key_module: the module whose `keys` returns the cache keys of a job on the machine that it runs on; without one, the
            whole spec is in the key.
        transitive: roles that another input already implies, so that Snakemake needn't wait for them. Where each of n parts
            reads all n parts, this saves n² edges in the graph.
        link: name of a link in the results folder to the payload that the manifest names under this key.
    """

    module: str
    spec: type[Model]
    payload: str
    job_name: str = "{name}"
    inputs: dict[str, Input] = field(default_factory=dict)
    files: tuple[str, ...] = ()
    further_files: str = ""
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
        """Return the keyword arguments of `build` by role: one artifact, a list of them, or files."""
        many = {role: artifacts.get(role, []) for role in self.many}
        return {role: artifacts[role][0] for role in self.one} | many | files

    @property
    def reads_manifests(self) -> bool:
        """Whether it reads the manifests of results of any stage, counts included."""
        return "manifests" in self.files

    @property
    def gpu(self) -> bool:
        """Whether it claims GPUs, and computes on the CPU where there are none."""
        return "gpus" in self.operation
