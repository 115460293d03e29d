"""The `ref_logps` stage: log-probabilities of every pair's completions under the reference model, as an artifact
(`training.reference.gather`)."""

from snaketune.stages.cache import libraries
from snaketune.stages.declaration import PASS, ModelCost, Stage, any_number, exactly_one
from snaketune.stages.specs import RefLogpsSpec
from snaketune.training.reference.cache_key import DIGESTED_BY, cache_keys

STAGE = Stage(
    module=__name__,
    work="snaketune.training.reference.gather",
    spec=RefLogpsSpec,
    payload="logps",
    inputs={
        "pack": exactly_one("pack"),
        "model": any_number("sft", "dpo"),
        "base_layers": any_number("sft", "dpo"),
        "tokenizer": any_number("tokenizer"),
    },
    files=("base",),
    libraries=libraries.FROZEN,
    operation=(*PASS, "parts"),
    takes_operation=True,
    digested_by=DIGESTED_BY,
    cache_keys=cache_keys,
    cost=ModelCost(flops=2),
    group="models",
    in_report=True,
)
