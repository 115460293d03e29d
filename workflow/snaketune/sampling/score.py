"""The `score` stage: numbers for the responses of a sample (`sampling.scores`)."""

from collections.abc import Sequence
from pathlib import Path

from snaketune.artifacts.manifest import Artifact
from snaketune.stages.cache import libraries
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.declaration import Cost, Stage, any_number, exactly_one
from snaketune.stages.outcome import Outcome
from snaketune.stages.specs import ScoreSpec

STAGE = Stage(
    module=__name__,
    spec=ScoreSpec,
    payload="scores",
    inputs={"samples": exactly_one("sample"), "scores": any_number("score", "judge", "rate")},
    files=("python",),
    libraries=libraries.always("pyarrow"),
    cost=Cost(mb=1500, mb_per_gb=8000, minutes=30),
    in_report=True,
)


def build(
    spec: ScoreSpec,
    work: WorkFolder,
    *,
    samples: Artifact,
    scores: Sequence[Artifact] = (),
    python: Sequence[Path] = (),
) -> Outcome:
    """Write `scores.arrow` to `work.payload`. Args: scores: the summands, in the order of their weights."""
    from snaketune.sampling.scores import write_scores

    return write_scores(spec, work, samples, list(scores), list(python))
