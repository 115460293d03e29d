"""The `sample` stage: the table of a sample's responses, joined from its parts (`sampling.response_table`)."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from snaketune.artifacts.manifest import Artifact
from snaketune.config.operation import Execution
from snaketune.stages.cache import libraries
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.declaration import Cost, Stage, any_number, exactly_one
from snaketune.stages.outcome import Outcome
from snaketune.stages.specs import SampleSpec

if TYPE_CHECKING:
    # What generates the parts shapes this result too: its code counts, though this job, which joins them, needn't import it.
    from snaketune.sampling.part import generate_part  # noqa: F401

STAGE = Stage(
    module=__name__,
    spec=SampleSpec,
    payload="responses",
    inputs={
        "prompts": exactly_one("prompts"),
        "tokenizer": exactly_one("tokenizer"),
        "model": any_number("sft", "dpo", "merge"),
        "base_layers": any_number("sft", "dpo"),
    },
    files=("base",),
    libraries=libraries.of_responses,
    operation=("parts",),
    takes_operation=True,
    cost=Cost(mb=1500, mb_per_gb=8000, minutes_per_gb=10, disk_per_text=4.0),
    in_report=True,
)


def build(
    spec: SampleSpec,
    work: WorkFolder,
    *,
    prompts: Artifact,
    tokenizer: Artifact,
    model: Sequence[Artifact] = (),
    base_layers: Sequence[Artifact] = (),
    base: Sequence[Path] = (),
    operation: Execution,
) -> Outcome:
    """Write `prompts.arrow` and `responses.arrow` to `work.payload`. Args: model, base_layers, base: what the responses are of;
    only their digests are read; operation: with the pattern of the parts' manifests."""
    from snaketune.sampling.response_table import write_responses

    return write_responses(spec, work, prompts, tokenizer, (*model, *base_layers), operation)
