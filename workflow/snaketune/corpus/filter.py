"""The `filter` stage: some of the files of a corpus that is read in parts, with the rows that are used (`corpus.last_pass`)."""

from snaketune.artifacts.manifest import Artifact
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.declaration import Cost, Stage, any_number, exactly_one
from snaketune.stages.outcome import Outcome
from snaketune.stages.specs import FilterSpec

STAGE = Stage(
    module=__name__,
    spec=FilterSpec,
    payload="rows",
    job_name="{name}/{part}",
    inputs={"decided": exactly_one("decide"), "read": any_number("read")},
    transitive=("read",),
    libraries=("pyarrow",),
    cost=Cost(mb_per_gb=100, minutes_per_gb=5, disk_per_text=1),
    group="data",
    array=True,
    in_report=True,
)


def build(spec: FilterSpec, work: WorkFolder, *, decided: Artifact, read: list[Artifact]) -> Outcome:
    """Write this part of the files to `work.payload`."""
    import json

    from snaketune.corpus.last_pass import FACTS, ROWS_WRITTEN, write_files
    from snaketune.corpus.rows import SPLITS
    from snaketune.corpus.selecting.scanned_parts import ScannedParts
    from snaketune.tables import read_table

    decided, *read = (artifact.for_part(spec.part) for artifact in (decided, *read))
    for part in read:
        part.files()
    facts = json.loads(decided.file(FACTS).read_text(encoding="utf-8"))
    parts = ScannedParts([part.folder for part in read], facts["sources"], facts["sources_of_parts"])
    table = read_table(decided.file(ROWS_WRITTEN))
    copies = {split: table[split].chunk(0).to_numpy() for split in SPLITS}
    rows = write_files(parts, parts.format(facts["kind"]), copies, work.payload, spec.part, spec.parts)
    return Outcome(counts={"rows": rows})
