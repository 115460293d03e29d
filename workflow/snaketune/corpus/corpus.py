"""The `corpus` stage: raw rows from every source, cleaned, without duplicates, split by prompt (`corpus.assembly`)."""

from collections.abc import Sequence
from pathlib import Path

from snaketune.artifacts.manifest import Artifact
from snaketune.locations import File
from snaketune.stages.cache import libraries
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.declaration import Cost, Stage, any_number
from snaketune.stages.outcome import Outcome
from snaketune.stages.specs import CorpusSpec

STAGE = Stage(
    module=__name__,
    spec=CorpusSpec,
    payload="rows",
    inputs={"against": any_number("corpus"), "selected": any_number("select")},
    files=("files", "against_files"),
    libraries=libraries.of_corpus,
    # Pairing completions and comparing near duplicates need the whole corpus in memory.
    cost=lambda spec: Cost(
        mb_per_gb=5000 if spec.kind == "unpaired" or spec.near_duplicates else 1000, minutes_per_gb=30, disk_per_text=1
    ),
    group="data",
    in_report=True,
)


def build(
    spec: CorpusSpec,
    work: WorkFolder,
    *,
    files: list[File],
    against: list[Artifact],
    against_files: list[Path],
    selected: Sequence[Artifact] = (),
) -> Outcome:
    """Write train.arrow and held_out.arrow to `work.payload`. Args: selected: rows from scored responses, one for each such
    source."""
    from snaketune.corpus.assembly import assemble

    return assemble(spec, work, files=files, against=against, against_files=against_files, selected=selected)
