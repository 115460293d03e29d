"""The declaration of a stage: `STAGE = Stage(...)` in the module that it is named after.

Planning, rules, command line, estimates and report follow from the declarations, which `stages.table` collects. It imports each
declaring module, so these import nothing heavy at their top (no numpy, pyarrow or torch). The `build` of a small stage is below
its declaration and imports such libraries when it is called; for a heavy stage, the declaration names the module with `build`.
The declaration isn't part of the code digest (`stages.cache.syntax`), so editing a cost or a group makes no result stale.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from snaketune.artifacts.manifest import Artifact
from snaketune.config.base import Model
from snaketune.locations import File

if TYPE_CHECKING:
    from snaketune.config.workflow import Workflow
    from snaketune.stages.cache.fingerprint import Key
    from snaketune.stages.job import Job
    from snaketune.stages.loaded_job import LoadedJob

# Keys of `Execution`: the devices that a stage computes on, and what a training takes besides.
DEVICES = ("gpus", "nodes", "launch", "zero_stage", "allow_cpu")
TRAINING = (
    *(*DEVICES, "checkpoint_steps", "log_steps", "load_in_memory", "preflight"),
    *("micro_batch_rows", "gradient_checkpointing", "activation_offloading", "calibration", "evaluate", "snapshots"),
    "race",
)
# Keys of `Execution` that a forward pass over reference log-probabilities takes.
PASS = ("gpus", "allow_cpu", "share_kernels")


class Input(NamedTuple):
    """An input role: the stages whose results may fill it, whether any number of results may, instead of exactly one, and the
    entries of their manifests, such as `counts.train`, that the stage reads and so counts besides payload and format."""

    stages: tuple[str, ...]
    many: bool
    entries: tuple[str, ...] = ()


def exactly_one(*stages: str, entries: tuple[str, ...] = ()) -> Input:
    return Input(stages, many=False, entries=entries)


def any_number(*stages: str, entries: tuple[str, ...] = ()) -> Input:
    return Input(stages, many=True, entries=entries)


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Memory, time and CPUs of a job that reads text, or weights as files; measured on the demo and on gsm8k, with a margin."""

    mb: int = 800
    mb_per_gb: int = 0  # of text
    minutes: int = 3
    minutes_per_gb: int = 0
    threads: int = 1
    bytes_per_parameter: int = 0  # of its model
    minutes_per_billion: int = 0
    disk_per_text: float = 0  # bytes of the result, per byte of text
    disk_per_parameter: int = 0


@dataclass(frozen=True, kw_only=True)
class ModelCost:
    """Memory, time and CPUs of a job that computes with a model, from its parameters and the tokens of its packs."""

    # Per parameter and token: 2 for a forward pass, 6 for forward and backward, 0 if time doesn't depend on tokens.
    flops: int
    disk_per_parameter: int = 0  # bytes of the result
    disk_per_stored_token: int = 0  # bytes per token of its pack, and per token that is stored for it (`k` of its spec)


@dataclass(frozen=True, kw_only=True)
class Stage:
    """The declaration of one stage."""

    module: str  # `__name__` of the module that declares it; its last part names the stage
    work: str = ""  # the module with `build(spec, work, **inputs)`; without it, the declaring module has it
    spec: type[Model]
    payload: str  # the name of the folder beside the manifest that holds the result's files
    job_name: str = "{name}"  # the folder of a job below `results/<stage>/`, as a pattern of wildcards
    inputs: dict[str, Input] = field(default_factory=dict)  # by role, the results that it reads
    files: tuple[str, ...] = ()  # roles filled by external files
    # For a stage that reads manifests: returns the paths of other files by role, from the spec.
    further_files: Callable[[Any], dict[str, list[str]]] | None = None
    libraries: tuple[str, ...] = ()  # the distributions whose version can shape the result
    # The resources of a job, or a function of the job's spec that returns them.
    cost: Cost | ModelCost | Callable[[Any], Cost] = Cost()
    # The group of short jobs that are sent to a cluster as one job (`cluster.resources`).
    group: Literal["data", "models"] | None = None
    array: bool = False  # whether its jobs are sent to a cluster as one array, and so request the same resources
    # Whether the report reads its results. Measurements made before a training are in that training's run.json.
    in_report: bool = False
    # For a stage whose jobs follow from those of others: returns its jobs, from the config and the jobs planned so far.
    jobs: "Callable[[Workflow, Iterable[Job]], Iterable[Job]] | None" = None
    operation: tuple[str, ...] = ()  # the keys of `Execution` that it uses; a launched `build` is given them
    launcher: str = ""  # the module whose `launch` runs `build` in worker processes, one per GPU
    takes_operation: bool = False  # whether `build` is given the operation though no processes are launched
    # Whether its result is a measurement of one machine at one time, so that a cached result isn't reused.
    measures: bool = False
    # By role, the manifest entry that is digested instead of the input's content.
    digested_by: dict[str, str] = field(default_factory=dict)
    # Returns the cache keys of a job on the machine that it runs on; without it, the whole spec is in the key.
    cache_keys: "Callable[[LoadedJob], tuple[Key, ...]] | None" = None
    # Roles that another input already implies, so that Snakemake needn't wait for them. Where each of n parts reads all n,
    # this saves n² edges in the graph.
    transitive: tuple[str, ...] = ()
    link: str = ""  # name of a link in the results folder to the payload that the manifest names under this key

    @property
    def name(self) -> str:
        return self.module.rpartition(".")[2]

    @property
    def code(self) -> str:
        """The module with its `build`. Its code digest begins at `module`, which names this module and the launcher."""
        return self.work or self.module

    def arguments(self, artifacts: dict[str, list[Artifact]], files: dict[str, list[File]]) -> dict[str, Any]:
        """The keyword arguments of `build` by role: one artifact, a list of them, or files."""
        read = {
            role: artifacts.get(role, []) if definition.many else artifacts[role][0]
            for role, definition in self.inputs.items()
        }
        return read | files

    @property
    def reads_manifests(self) -> bool:
        """Whether it reads the manifests of results of any stage, counts included."""
        return "manifests" in self.files

    @property
    def gpu(self) -> bool:
        """Whether it claims GPUs, and computes on the CPU where there are none."""
        return "gpus" in self.operation
