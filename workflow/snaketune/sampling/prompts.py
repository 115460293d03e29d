"""The `prompts` stage: the prompts of a sample, encoded (`sampling.prompt_rows`)."""

from collections.abc import Sequence
from pathlib import Path

from snaketune.artifacts.manifest import Artifact
from snaketune.stages.cache import libraries
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.declaration import Cost, Stage, any_number, exactly_one
from snaketune.stages.outcome import Outcome
from snaketune.stages.specs import PromptsSpec

STAGE = Stage(
    module=__name__,
    spec=PromptsSpec,
    payload="rows",
    inputs={
        "corpora": any_number("corpus"),
        "tokenizer": exactly_one("tokenizer"),
        "scores": any_number("score", "judge", "rate"),
    },
    files=("base",),
    libraries=libraries.always("tokenizers"),
    cost=Cost(mb=1500, mb_per_gb=6000, minutes=5, minutes_per_gb=30, disk_per_text=2.0),
    group="data",
)


def build(
    spec: PromptsSpec,
    work: WorkFolder,
    *,
    corpora: list[Artifact],
    tokenizer: Artifact,
    base: list[Path],
    scores: Sequence[Artifact] = (),
) -> Outcome:
    """Write `prompts.arrow` to `work.payload`.

    Args:
        base: config.json of a local base model, which `spec.base` names.
        scores: of earlier samples, by which prompts are settled; the last one last.
    """
    from snaketune.sampling.prompt_rows import write_prompts

    return write_prompts(spec, work, corpora, tokenizer, scores)
