"""The `decide` stage: which rows of a corpus that is read in parts are used, and in which split (`corpus.decisions`)."""

from snaketune.artifacts.manifest import Artifact
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.declaration import Cost, Stage, any_number
from snaketune.stages.outcome import Outcome
from snaketune.stages.specs import DecideSpec

STAGE = Stage(
    module=__name__,
    spec=DecideSpec,
    payload="decisions",
    inputs={"read": any_number("read")},
    libraries=("numpy", "pyarrow", "rensa"),
    # Comparing near duplicates needs 40 bytes of each row in memory.
    cost=lambda spec: Cost(mb_per_gb=400 if spec.near_duplicates else 60, mb=3000, minutes_per_gb=2),
    group="data",
    in_report=True,
)


def build(spec: DecideSpec, work: WorkFolder, *, read: list[Artifact]) -> Outcome:
    """Write to `work.payload` how often each row is written to each split, the records of the corpus, and its counts."""
    import pyarrow as pa

    from snaketune.corpus.assembly import decide_rows
    from snaketune.corpus.last_pass import FACTS, ROWS_WRITTEN
    from snaketune.corpus.selecting.scanned_parts import ScannedParts
    from snaketune.files import write_json
    from snaketune.tables import write_table

    for part in read:
        part.files()
    parts = ScannedParts([part.folder for part in read], len(spec.sources), spec.sources_of_parts)
    decided = decide_rows(spec, work, parts)
    copies = pa.table({split: pa.array(copies) for split, copies in decided.decisions.by_split.items()})
    # In one batch, so that each column can be mapped as a whole.
    write_table(work.payload / ROWS_WRITTEN, copies, len(copies))
    facts = {"counts": decided.counts, "about": decided.about, "records": decided.records}
    facts |= {"kind": spec.kind, "sources": len(spec.sources), "sources_of_parts": spec.sources_of_parts}
    write_json(work.payload / FACTS, facts)
    # As payload, not as records: `corpus` reads them.
    return Outcome(counts=decided.counts, about=decided.about)
