"""The `merge` stage: average the weights of models, without training (`training.merging`)."""

from collections.abc import Sequence
from pathlib import Path

from snaketune.artifacts.manifest import Artifact
from snaketune.stages.cache import libraries
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.declaration import Cost, Stage, any_number
from snaketune.stages.outcome import Outcome
from snaketune.stages.specs import MergeSpec

STAGE = Stage(
    module=__name__,
    spec=MergeSpec,
    payload="model",
    inputs={"models": any_number("sft", "dpo", entries=("saved_dtype",))},
    files=("base",),
    libraries=libraries.MODEL,
    # The average and one model in float32.
    cost=Cost(mb=2000, minutes=5, bytes_per_parameter=10, minutes_per_billion=2, disk_per_parameter=4),
)


def build(spec: MergeSpec, work: WorkFolder, *, models: list[Artifact], base: Sequence[Path] = ()) -> Outcome:
    """Write a model folder to `work.payload`: weights, config and tokenizer; SnaketuneError if the models don't fit together.

    Args:
        models: the results of `spec.models`, each model from the top down.
        base: files of bases in local folders, which the models name.
    """
    from snaketune.models.adapter_stack import AdapterStack
    from snaketune.training.merging import merge
    from snaketune.training.save_model import copy_other_files

    for result in models:
        result.files()
    stacks, left = [], list(models)
    for model in spec.models:
        results, left = tuple(left[: model.results]), left[model.results :]
        stacks.append(
            AdapterStack(
                results=results, base=model.base, tokenizer=results[0].folder, trust_remote_code=spec.trust_remote_code
            )
        )
    dtype = merge(stacks, [model.weight for model in spec.models], spec.method, work.payload)
    copy_other_files(models[0], work.payload)
    return Outcome(about={"saved_dtype": dtype})
