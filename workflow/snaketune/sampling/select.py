"""The `select` stage: rows for a corpus from scored responses (`sampling.selection`)."""

from snaketune.stages.declaration import Cost, Stage, exactly_one
from snaketune.stages.specs import SelectSpec

STAGE = Stage(
    module=__name__,
    work="snaketune.sampling.selection",
    spec=SelectSpec,
    payload="rows",
    inputs={"samples": exactly_one("sample"), "scores": exactly_one("score", "judge", "rate")},
    libraries=("pyarrow",),
    operation=("sampled",),
    takes_operation=True,
    cost=Cost(mb=1500, mb_per_gb=8000, minutes_per_gb=10),
    in_report=True,
)
