"""The `pack` stage: all shards of a plan as one artifact, by hard link; of pairs also which pairs they are."""

import json
import os
import shutil
from pathlib import Path

from snaketune.artifacts.manifest import Artifact
from snaketune.packing.plan import FACTS
from snaketune.packing.same_pairs import digest_pairs
from snaketune.stages.outcome import Outcome
from snaketune.stages.specs import PackSpec
from snaketune.stages.work import WorkFolder


def build(spec: PackSpec, work: WorkFolder, *, plan: Artifact, shards: list[Artifact]) -> Outcome:
    """Fill `work.payload` with `<split>-<number>.arrow` and `documents.arrow`."""
    for path in [*(path for part in shards for path in part.files()), *plan.files("documents")]:
        _link(path, work.payload / path.name)
    facts = json.loads(plan.file(FACTS).read_text(encoding="utf-8"))
    about = facts["about"]
    if about["kind"] != "sft":
        about["pairs"] = digest_pairs(sorted(work.payload.glob("*-*.arrow")), work.payload / "documents.arrow")
    return Outcome(counts=facts["counts"], about=about)


def _link(path: Path, target: Path) -> None:
    try:
        os.link(path, target)
    except OSError:
        shutil.copyfile(path, target)
