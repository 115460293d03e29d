"""The `sample` stage: the table of a sample's responses, joined from its parts (`sampling.response_table`)."""

from typing import TYPE_CHECKING

from snaketune.stages.cache import libraries
from snaketune.stages.declaration import Cost, Stage, any_number, exactly_one
from snaketune.stages.specs import SampleSpec

if TYPE_CHECKING:
    # What generates the parts shapes this result too: its code counts, though this job, which joins them, needn't import it.
    from snaketune.sampling.part import build  # noqa: F401

STAGE = Stage(
    module=__name__,
    work="snaketune.sampling.response_table",
    spec=SampleSpec,
    payload="responses",
    inputs={
        "prompts": exactly_one("prompts"),
        "tokenizer": exactly_one("tokenizer"),
        "model": any_number("sft", "dpo", "merge"),
        "base_layers": any_number("sft", "dpo"),
    },
    files=("base",),
    libraries=libraries.MODEL,
    operation=("parts",),
    takes_operation=True,
    cost=Cost(mb=1500, mb_per_gb=8000, minutes_per_gb=10, disk_per_text=4.0),
    in_report=True,
)
