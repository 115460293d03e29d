"""The `plan` stage: which tokens of which sequence go into which row (`packing.row_plan`)."""

from snaketune.stages.declaration import Cost, Stage, any_number
from snaketune.stages.specs import PlanSpec


def is_compact(spec: PlanSpec) -> bool:
    return spec.kind == "sft" and spec.strategy == "best-fit-decreasing" and spec.order == "shuffled"


STAGE = Stage(
    module=__name__,
    work="snaketune.packing.row_plan",
    spec=PlanSpec,
    payload="plan",
    inputs={"tokens": any_number("tokenize"), "corpus": any_number("corpus")},
    libraries=("numpy", "pyarrow"),
    # Nearly all conversations are packed whole, and take 16 bytes each (`engine.packing.planner`).
    cost=lambda spec: Cost(mb_per_gb=100 if is_compact(spec) else 300, minutes_per_gb=5),
    group="data",
    in_report=True,
)
