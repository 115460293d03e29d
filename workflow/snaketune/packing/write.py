"""The `write` stage: some of the shards, from the plan (`packing.shard_writer`)."""

from snaketune.stages.declaration import Cost, Stage, any_number, exactly_one
from snaketune.stages.specs import WriteSpec

STAGE = Stage(
    module=__name__,
    work="snaketune.packing.shard_writer",
    spec=WriteSpec,
    payload="shards",
    job_name="{name}/{part}",
    inputs={"plan": exactly_one("plan"), "tokens": any_number("tokenize"), "corpus": any_number("corpus")},
    transitive=("tokens",),
    libraries=("pyarrow",),
    cost=Cost(mb_per_gb=300, minutes_per_gb=10, disk_per_text=2),
    group="data",
    array=True,
    in_report=True,
)
