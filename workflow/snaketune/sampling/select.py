"""The `select` stage: rows for a corpus from scored responses (`sampling.selection`)."""

from typing import Any

from snaketune.artifacts.manifest import Artifact
from snaketune.stages.cache import libraries
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.declaration import Cost, Stage, exactly_one
from snaketune.stages.outcome import Outcome
from snaketune.stages.specs import SelectSpec

STAGE = Stage(
    module=__name__,
    spec=SelectSpec,
    payload="rows",
    inputs={"samples": exactly_one("sample"), "scores": exactly_one("score", "judge", "rate")},
    libraries=libraries.always("pyarrow"),
    operation=("sampled",),
    takes_operation=True,
    cost=Cost(mb=1500, mb_per_gb=8000, minutes_per_gb=10),
    in_report=True,
)


def build(spec: SelectSpec, work: WorkFolder, *, samples: Artifact, scores: Artifact, operation: Any = None) -> Outcome:
    """Write `selected.jsonl` to `work.payload`. Args: operation: `Execution`, with the name of the sampled model."""
    from snaketune.sampling.selection import write_selection

    return write_selection(spec, work, samples, scores, operation.sampled if operation else "")
