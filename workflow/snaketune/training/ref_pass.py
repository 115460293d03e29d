"""The `ref_pass` stage: log-probabilities of one part of the pairs under the reference model (`training.reference.compute`)."""

from snaketune.stages.cache import libraries
from snaketune.stages.declaration import PASS, ModelCost, Stage, any_number, exactly_one
from snaketune.stages.specs import RefPassSpec
from snaketune.training.reference.cache_key import cache_keys

STAGE = Stage(
    module=__name__,
    work="snaketune.training.reference.compute",
    spec=RefPassSpec,
    payload="logps",
    job_name="{name}/{part}",
    inputs={
        "pack": exactly_one("pack"),
        "model": any_number("sft", "dpo"),
        "base_layers": any_number("sft", "dpo"),
        "tokenizer": any_number("tokenizer"),
    },
    files=("base",),
    libraries=libraries.FROZEN,
    operation=PASS,
    cache_keys=cache_keys,
    cost=ModelCost(flops=2),
    group="models",
    array=True,
)
