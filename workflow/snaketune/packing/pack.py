"""The `pack` stage: all shards of a plan as one artifact, by hard link."""

import json
import os
import shutil
from pathlib import Path

from snaketune.artifacts.manifest import Artifact
from snaketune.packing.plan import FACTS
from snaketune.stages.outcome import Outcome
from snaketune.stages.specs import PackSpec
from snaketune.stages.work import WorkFolder


def build(spec: PackSpec, work: WorkFolder, *, plan: Artifact, shards: list[Artifact]) -> Outcome:
    """Fill `work.payload` with `<split>-<number>.arrow` and `documents.arrow`."""
    for path in [*(path for part in shards for path in part.files()), *plan.files("documents")]:
        _link(path, work.payload / path.name)
    facts = json.loads(plan.file(FACTS).read_text(encoding="utf-8"))
    return Outcome(counts=facts["counts"], about=facts["about"])


def _link(path: Path, target: Path) -> None:
    try:
        os.link(path, target)
    except OSError:
        shutil.copyfile(path, target)
