"""The `sft` stage: supervised fine-tuning, full or LoRA, from scratch or from a model."""

from pathlib import Path

from snaketune.artifacts.manifest import Artifact
from snaketune.config.runs import Operation
from snaketune.stages.outcome import Outcome
from snaketune.stages.specs import SftSpec
from snaketune.stages.work import WorkFolder
from snaketune.training.launch import launch


def build(
    spec: SftSpec, work: WorkFolder, *, operation: Operation, pack: Artifact, tokenizer: Artifact, base: list[Path]
) -> Outcome:
    """Fill `work.payload` with a complete model folder: weights, config and tokenizer."""
    return launch(
        "snaketune.training.sft_worker",
        stage=__name__,
        spec=spec,
        operation=operation,
        work=work,
        pack=pack,
        tokenizer=tokenizer,
    )
