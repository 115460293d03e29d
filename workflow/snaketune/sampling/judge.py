"""The `judge` stage: scores of a sample's responses by a model (`sampling.judge_questions`)."""

from collections.abc import Sequence
from pathlib import Path

from snaketune.artifacts.manifest import Artifact
from snaketune.config.operation import Execution
from snaketune.stages.cache import libraries
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.declaration import ModelCost, Stage, any_number, exactly_one
from snaketune.stages.outcome import Outcome
from snaketune.stages.specs import JudgeSpec

STAGE = Stage(
    module=__name__,
    spec=JudgeSpec,
    payload="scores",
    inputs={
        "samples": exactly_one("sample"),
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
    spec: JudgeSpec,
    work: WorkFolder,
    *,
    samples: Artifact,
    tokenizer: Sequence[Artifact] = (),
    model: Sequence[Artifact] = (),
    base_layers: Sequence[Artifact] = (),
    rubric: Sequence[Path],
    base: Sequence[Path] = (),
    operation: Execution,
) -> Outcome:
    """Write `scores.arrow` and `replies.arrow` to `work.payload`. Args: tokenizer: none for a server's model; base: files of a
    local base model."""
    from snaketune.sampling.judge_models import judge_of
    from snaketune.sampling.judge_questions import score_by_judge, score_schema

    results = (*model, *base_layers)
    judge = judge_of(
        spec,
        work,
        tokenizer=tokenizer,
        results=results,
        base_files=base,
        operation=operation,
        schema=score_schema(spec),
    )
    return score_by_judge(spec, work, samples, rubric[0], judge)
