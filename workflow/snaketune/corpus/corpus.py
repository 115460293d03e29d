"""The `corpus` stage: raw rows from every source, cleaned, without duplicates, split by prompt (`corpus.assembly`)."""

import json
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
    inputs={
        "against": any_number("corpus"),
        "selected": any_number("select"),
        "decided": any_number("decide"),
        "filtered": any_number("filter"),
    },
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
    decided: Sequence[Artifact] = (),
    filtered: Sequence[Artifact] = (),
) -> Outcome:
    """Write `train-00000.arrow`, `held_out-00000.arrow` and so on to `work.payload`.

    Args:
        selected: rows from scored responses, one for each such source.
        decided, filtered: the result of `decide` and those of `filter`, if the corpus is read in parts; then nothing else is.
    """
    if decided:
        return _linked(work, decided[0], filtered)
    from snaketune.corpus.assembly import assemble

    return assemble(spec, work, files=files, against=against, against_files=against_files, selected=selected)


def _linked(work: WorkFolder, decided: Artifact, filtered: Sequence[Artifact]) -> Outcome:
    from snaketune.corpus.last_pass import FACTS, ROWS_WRITTEN
    from snaketune.stages.cache.payload_files import place

    facts = json.loads(decided.file(FACTS).read_text(encoding="utf-8"))
    kept = [path for path in decided.files() if path.name not in (FACTS, ROWS_WRITTEN)]
    records = [decided.file(name) for name in facts["records"]]
    for path in [*(path for part in filtered for path in part.files()), *kept, *records]:
        place(path, work.payload / path.name)
    return Outcome(counts=facts["counts"], about=facts["about"], records=tuple(facts["records"]))
