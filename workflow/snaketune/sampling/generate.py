"""The `generate` stage: the responses to one part of a sample's prompts (`sampling.part`)."""

from collections.abc import Sequence
from pathlib import Path

from snaketune.artifacts.manifest import Artifact
from snaketune.config.operation import Execution
from snaketune.stages.cache import libraries
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.declaration import ModelCost, Stage, any_number, exactly_one
from snaketune.stages.outcome import Outcome
from snaketune.stages.specs import GenerateSpec

STAGE = Stage(
    module=__name__,
    spec=GenerateSpec,
    payload="responses",
    job_name="{name}/{part}",
    inputs={
        "prompts": exactly_one("prompts"),
        "tokenizer": exactly_one("tokenizer"),
        "model": any_number("sft", "dpo", "merge"),
        "base_layers": any_number("sft", "dpo"),
    },
    files=("base",),
    libraries=libraries.of_responses,
    operation=("gpus", "engine", "vllm"),
    takes_operation=True,
    cost=ModelCost(flops=2),
    group="models",
    array=True,
)


def build(
    spec: GenerateSpec,
    work: WorkFolder,
    *,
    prompts: Artifact,
    tokenizer: Artifact,
    model: Sequence[Artifact] = (),
    base_layers: Sequence[Artifact] = (),
    base: Sequence[Path] = (),
    operation: Execution,
) -> Outcome:
    """Write this part's `responses.arrow` to `work.payload`. Args: base: files of a local base model, which `spec.base` names;
    operation: with the engine."""
    from snaketune.sampling.part import generate_part

    results = (*model, *base_layers)
    return generate_part(spec, work, prompts, tokenizer, results=results, base_files=base, operation=operation)
