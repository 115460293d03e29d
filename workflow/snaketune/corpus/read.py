"""The `read` stage: the raw rows of one part of a corpus, canonical and cleaned, with records of them (`corpus.first_pass`)."""

from pathlib import Path

from snaketune.artifacts.manifest import Artifact
from snaketune.locations import File, size_of
from snaketune.stages.cache import libraries
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.declaration import Cost, Stage, any_number
from snaketune.stages.outcome import Outcome
from snaketune.stages.specs import ReadSpec

STAGE = Stage(
    module=__name__,
    spec=ReadSpec,
    payload="rows",
    job_name="{name}/{part}",
    inputs={"against": any_number("corpus"), "selected": any_number("select")},
    files=("files", "against_files"),
    libraries=libraries.CORPUS,
    # Of the text that it reads; pairing completions needs a whole file in memory.
    cost=lambda spec: Cost(mb_per_gb=5000 if spec.kind == "unpaired" else 1000, minutes_per_gb=30, disk_per_text=1),
    group="data",
    array=True,
    in_report=True,
)


def build(
    spec: ReadSpec,
    work: WorkFolder,
    *,
    files: list[File],
    against: list[Artifact],
    against_files: list[Path],
    selected: list[Artifact],
) -> Outcome:
    from snaketune.corpus.assembly import read_sources
    from snaketune.corpus.reading.ranges import Range

    counts = read_sources(spec, work.payload, files, against, against_files, selected)
    spans = (Range(*part).of(size_of(path)) for path, part in zip(files, spec.ranges, strict=True))
    return Outcome(
        counts=counts, run={"rows_read": counts["read"], "bytes_read": sum(end - start for start, end in spans)}
    )
