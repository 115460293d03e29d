"""The `corpus` stage: raw rows from every source, cleaned, without duplicates, split by prompt (`corpus.assembly`)."""

from snaketune.stages.cache import libraries
from snaketune.stages.declaration import Cost, Stage, any_number
from snaketune.stages.specs import CorpusSpec

STAGE = Stage(
    module=__name__,
    work="snaketune.corpus.assembly",
    spec=CorpusSpec,
    payload="rows",
    inputs={
        "against": any_number("corpus"),
        "selected": any_number("select"),
        "decided": any_number("decide"),
        "filtered": any_number("filter"),
    },
    files=("files", "against_files"),
    libraries=libraries.CORPUS,
    # Pairing completions and comparing near duplicates need the whole corpus in memory.
    cost=lambda spec: Cost(
        mb_per_gb=5000 if spec.kind == "unpaired" or spec.near_duplicates else 1000, minutes_per_gb=30, disk_per_text=1
    ),
    group="data",
    in_report=True,
)
