"""The `compare` stage: a judge compares a model's responses with those of another model (`evaluation.comparison`)."""

from collections.abc import Sequence
from pathlib import Path

from snaketune.artifacts.manifest import Artifact
from snaketune.config.operation import Execution
from snaketune.stages.cache import libraries
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.declaration import ModelCost, Stage, any_number, exactly_one
from snaketune.stages.outcome import Outcome
from snaketune.stages.specs import CompareSpec

# How long the responses may be.
GENERATED = ("spec.generation.max_new_tokens",)
STAGE = Stage(
    module=__name__,
    spec=CompareSpec,
    payload="verdicts",
    job_name="{evaluation}/{model}",
    inputs={
        "evaluated": exactly_one("eval", entries=GENERATED),
        "opponent": exactly_one("eval", entries=GENERATED),
        "tokenizer": any_number("tokenizer"),
        "model": any_number("sft", "dpo", "merge"),
        "base_layers": any_number("sft", "dpo"),
    },
    files=("rubric", "base"),
    libraries=libraries.of_responses,
    operation=("gpus", "engine", "vllm"),
    takes_operation=True,
    cost=ModelCost(flops=2),
    group="models",
    in_report=True,
)


def build(
    spec: CompareSpec,
    work: WorkFolder,
    *,
    evaluated: Artifact,
    opponent: Artifact,
    tokenizer: Sequence[Artifact] = (),
    model: Sequence[Artifact] = (),
    base_layers: Sequence[Artifact] = (),
    rubric: Sequence[Path],
    base: Sequence[Path] = (),
    operation: Execution,
) -> Outcome:
    """Write `win_rate.json` and `verdicts.arrow` to `work.payload`. Args: opponent: the evaluation of the other model; the rest
    as in the stage `judge`."""
    from snaketune.evaluation.comparison import compare_responses
    from snaketune.sampling.judge_models import judge_of

    results = (*model, *base_layers)
    judge = judge_of(spec, work, tokenizer=tokenizer, results=results, base_files=base, operation=operation)
    return compare_responses(spec, work, evaluated, opponent, rubric[0], judge)
