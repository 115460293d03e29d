"""The `pack` stage: all shards of a plan as one artifact, by hard link."""

import os
import shutil
from pathlib import Path

from snaketune.artifacts.manifest import Artifact
from snaketune.artifacts.stage import Outcome
from snaketune.artifacts.work import WorkFolder
from snaketune.config.specs import PackSpec

# What the plan tells of its rows is true of the shards.
FACTS = ("format_version", "kind", "row_length", "packing_metadata", "packing_metadata_held_out", "padding_id")


def build(spec: PackSpec, work: WorkFolder, *, plan: Artifact, shards: list[Artifact]) -> Outcome:
    """Fill `work.payload` with `<split>-<number>.arrow` and `documents.arrow`."""
    for path in [*(path for part in shards for path in part.files()), *plan.files("documents")]:
        _link(path, work.payload / path.name)
    return Outcome(
        counts=plan.manifest["counts"], about={name: plan.manifest[name] for name in FACTS}, libraries=("pyarrow",)
    )


def _link(path: Path, target: Path) -> None:
    try:
        os.link(path, target)
    except OSError:
        shutil.copyfile(path, target)
