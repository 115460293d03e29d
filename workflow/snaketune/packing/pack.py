"""The `pack` stage: all shards of a plan as one artifact, by hard link; for pairs also a digest of the pairs."""

import json

from snaketune.artifacts.manifest import Artifact
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.declaration import Cost, Stage, any_number, exactly_one
from snaketune.stages.outcome import Outcome
from snaketune.stages.specs import PackSpec

STAGE = Stage(
    module=__name__,
    spec=PackSpec,
    payload="shards",
    inputs={"plan": exactly_one("plan"), "shards": any_number("write")},
    libraries=("pyarrow",),
    cost=Cost(mb_per_gb=100, minutes_per_gb=5),
    in_report=True,
)


def build(spec: PackSpec, work: WorkFolder, *, plan: Artifact, shards: list[Artifact]) -> Outcome:
    """Link `<split>-<number>.arrow` and `documents.arrow` into `work.payload`."""
    from snaketune.packing.pairs_digest import digest_pairs
    from snaketune.packing.row_plan import FACTS
    from snaketune.stages.cache.payload_files import place

    for path in [*(path for part in shards for path in part.files()), *plan.files("documents")]:
        place(path, work.payload / path.name)
    facts = json.loads(plan.file(FACTS).read_text(encoding="utf-8"))
    about = facts["about"]
    if about["kind"] != "sft":
        about["pairs"] = digest_pairs(sorted(work.payload.glob("*-*.arrow")), work.payload / "documents.arrow")
    return Outcome(counts=facts["counts"], about=about)
