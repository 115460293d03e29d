"""The `prompts` stage: the prompts of a sample, encoded (`sampling.prompt_rows`)."""

from snaketune.stages.declaration import Cost, Stage, any_number, exactly_one
from snaketune.stages.specs import PromptsSpec

STAGE = Stage(
    module=__name__,
    work="snaketune.sampling.prompt_rows",
    spec=PromptsSpec,
    payload="rows",
    inputs={
        "corpora": any_number("corpus"),
        "tokenizer": exactly_one("tokenizer"),
        "scores": any_number("score", "judge", "rate"),
    },
    files=("base",),
    libraries=("tokenizers",),
    cost=Cost(mb=1500, mb_per_gb=6000, minutes=5, minutes_per_gb=30, disk_per_text=2.0),
    group="data",
)
