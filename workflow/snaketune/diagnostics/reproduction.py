"""The `reproduction` stage: a finished training's steps once more, on the kind of machine that trains (`snakemake replay`).

    verify.json    as of `verification`

A figure that differs doesn't fail the job, so that all results are there; `snakemake replay` ends with an error then.
"""

from collections.abc import Sequence
from pathlib import Path

from snaketune.artifacts.manifest import Artifact
from snaketune.config.operation import Execution
from snaketune.stages.cache import libraries
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.declaration import TRAINING, ModelCost, Stage, any_number, exactly_one
from snaketune.stages.outcome import Outcome
from snaketune.stages.specs import ReproductionSpec, SftSpec

# Keys of a training's `Execution` that a replay does without: what is measured and decided before, and snapshots to start from.
BEFORE = ("race", "snapshots", "preflight", "calibration")

STAGE = Stage(
    module=__name__,
    spec=ReproductionSpec,
    payload="checks",
    inputs={
        # What is compared; `code` is that of the whole training, so that a change of it replays the training made with it.
        "model": exactly_one("sft", "dpo", entries=("spec", "inputs", "versions", "code", "dtype")),
        "snapshots": any_number("sft", "dpo", entries=("spec.training.until", "counts.steps", "fingerprint")),
        "start": any_number("sft", "dpo"),
        "pack": exactly_one("pack"),
        "tokenizer": any_number("tokenizer"),
        "teacher": any_number("teacher"),
        "ref_logps": any_number("ref_logps"),
        "reference": any_number("sft", "dpo"),
    },
    files=("base",),
    libraries=libraries.TRAINING,
    operation=tuple(key for key in (*TRAINING, "share_kernels") if key not in BEFORE),
    takes_operation=True,
    cost=ModelCost(flops=6),
)


def build(
    spec: ReproductionSpec,
    work: WorkFolder,
    *,
    operation: Execution,
    model: Artifact,
    snapshots: Sequence[Artifact],
    start: Sequence[Artifact],
    pack: Artifact,
    tokenizer: Sequence[Artifact],
    teacher: Sequence[Artifact],
    ref_logps: Sequence[Artifact],
    reference: Sequence[Artifact],
    base: Sequence[Path] = (),
) -> Outcome:
    """Write `verify.json` to `work.payload`.

    Args:
        model: the finished training; snapshots: of it.
        start: the result that it started from and its base layers.
        tokenizer, teacher: of an SFT run; ref_logps, reference: of a DPO run, as that reads them.
        base: the files of a local base model.
    """
    from snaketune.diagnostics.replay import Record, write_replayed
    from snaketune.stages.job_files import JobFile

    results = {
        "model": start[:1],
        "base_layers": start[1:],
        "pack": (pack,),
        "tokenizer": tokenizer,
        "teacher": teacher,
    }
    results |= {"ref_logps": ref_logps, "reference": reference}
    inputs = {role: tuple(str(one.manifest_path) for one in read) for role, read in results.items() if read}
    job_file = JobFile(
        stage="sft" if isinstance(spec.run, SftSpec) else "dpo",
        out="",
        spec=spec.run.model_dump(mode="json"),
        inputs=inputs | ({"base": tuple(map(str, base))} if base else {}),
        operation=operation.model_dump(mode="json"),
    )
    return write_replayed(Record.read(model, tuple(snapshots)), job_file, spec.steps, work)
