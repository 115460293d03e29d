"""The `score` stage: numbers for the responses of a sample (`sampling.scores`)."""

from snaketune.stages.declaration import Cost, Stage, any_number, exactly_one
from snaketune.stages.specs import ScoreSpec

STAGE = Stage(
    module=__name__,
    work="snaketune.sampling.scores",
    spec=ScoreSpec,
    payload="scores",
    inputs={"samples": exactly_one("sample"), "scores": any_number("score", "judge", "rate")},
    files=("python",),
    libraries=("pyarrow",),
    cost=Cost(mb=1500, mb_per_gb=8000, minutes=30),
    in_report=True,
)
