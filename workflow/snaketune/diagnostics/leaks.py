"""Held-out rows that a training sees all the same."""

import pyarrow as pa
import pyarrow.compute as pc

from snaketune.artifacts.manifest import Artifact
from snaketune.stages.needs import Finding
from snaketune.tables import read_table


def held_out_in_training(corpora: list[Artifact], evaluated: list[Artifact]) -> list[Finding]:
    """Rows that are held out of one corpus and trained on in another; an id is a digest of what a row says, so ids are enough.

    Args:
        corpora: that are trained on.
        evaluated: of whose held-out rows models are asked. Within one corpus equal rows are always on one side.
    """
    found = []
    trained = {corpus.folder.parent.name: corpus for corpus in corpora}
    for corpus in evaluated:
        name = corpus.folder.parent.name
        held_out = _ids(corpus, "held_out")
        for other, seen in trained.items():
            both = pc.sum(pc.is_in(held_out, value_set=_ids(seen, "train"))).as_py() or 0
            if both and other != name:
                found.append(
                    Finding(
                        key=f"corpora.{other}.decontamination",
                        found=f"{both:,} of the {len(held_out):,} held-out rows of {name} are trained on in {other}, so that "
                        "scores on them say little",
                        do="set it ({}), or take them out of the files",
                        certain=False,
                    )
                )
    return found


def _ids(corpus: Artifact, split: str) -> pa.ChunkedArray:
    return read_table(corpus.file(f"{split}.arrow")).column("id")
