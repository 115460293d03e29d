"""The `verification` stage: checks of a finished training that a reader of its model can repeat (`snakemake verify`).

    verify.json    {"checks": [{name, compares, status, figure, tolerance, at_least, reason}, ...]}

A failed check doesn't fail the job, so that all results are there; `snakemake verify` ends with an error then.
"""

from collections.abc import Sequence
from pathlib import Path

from snaketune.artifacts.manifest import Artifact
from snaketune.config.operation import Execution
from snaketune.stages.cache import libraries
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.declaration import ModelCost, Stage, any_number, exactly_one
from snaketune.stages.outcome import Outcome
from snaketune.stages.specs import VerificationSpec

STAGE = Stage(
    module=__name__,
    spec=VerificationSpec,
    payload="checks",
    inputs={
        "model": exactly_one("sft", "dpo", entries=("saved_dtype", "dtype")),
        "start": any_number("sft", "dpo"),
        "pack": exactly_one("pack"),
        "tokenizer": any_number("tokenizer"),
        "ref_logps": any_number("ref_logps", entries=("spec", "dtype")),
        "reference": any_number("sft", "dpo"),
        "corpus": exactly_one("corpus"),
        "evaluation": any_number("eval", entries=("dtype", "spec", "generation.strategy", "generation.engine.name")),
        "evaluated": any_number("pack"),
        "prompted": any_number("corpus"),
        "gguf": any_number("convert"),
    },
    files=("base",),
    libraries=(*libraries.MODEL, "accelerate", "gguf"),
    operation=("gpus", "allow_cpu", "load_in_memory", "share_kernels"),
    takes_operation=True,
    cost=ModelCost(flops=0),
)


def build(
    spec: VerificationSpec,
    work: WorkFolder,
    *,
    operation: Execution,
    model: Artifact,
    start: Sequence[Artifact],
    pack: Artifact,
    tokenizer: Sequence[Artifact],
    ref_logps: Sequence[Artifact],
    reference: Sequence[Artifact],
    corpus: Artifact,
    evaluation: Sequence[Artifact],
    evaluated: Sequence[Artifact],
    prompted: Sequence[Artifact],
    gguf: Sequence[Artifact],
    base: Sequence[Path] = (),
) -> Outcome:
    """Write `verify.json` to `work.payload`.

    Args:
        model: the finished training; start: the result that it started from and its base layers.
        tokenizer: of an SFT run; ref_logps, reference: of a DPO run, as that reads them.
        corpus: of the training's rows.
        evaluation, evaluated: an evaluation of the model, and its packs, in the order of the spec's corpora.
        prompted: the corpora of its prompts.
        gguf: the file that was made of the model.
        base: the folder of a local base model; unused, as the spec has its path.
    """
    from snaketune.diagnostics.verified_training import FinishedTraining, verify_training

    return verify_training(
        FinishedTraining(
            spec=spec,
            work=work,
            operation=operation,
            model=model,
            start=tuple(start),
            pack=pack,
            tokenizer=tokenizer,
            ref_logps=ref_logps,
            reference=reference,
            corpus=corpus,
            evaluation=evaluation,
            evaluated=evaluated,
            prompted=prompted,
            gguf=gguf,
        )
    )
