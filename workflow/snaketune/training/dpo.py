"""The `dpo` stage: direct preference optimization on packed pairs, against reference log-probabilities from their artifact."""

from snaketune.artifacts.manifest import Artifact
from snaketune.config.runs import Operation
from snaketune.stages.outcome import Outcome
from snaketune.stages.specs import DpoSpec
from snaketune.stages.work import WorkFolder
from snaketune.training.launch import launch


def build(
    spec: DpoSpec, work: WorkFolder, *, operation: Operation, model: Artifact, pack: Artifact, ref_logps: Artifact
) -> Outcome:
    """Fill `work.payload` with a complete model folder: weights, config and tokenizer."""
    return launch(
        "snaketune.training.dpo_worker",
        stage=__name__,
        spec=spec,
        operation=operation,
        work=work,
        model=model,
        pack=pack,
        ref_logps=ref_logps,
    )
