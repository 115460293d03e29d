"""The `report` stage: an HTML report of all results, and figures and tables for Snakemake's own report.

`report.page_files` writes them.
"""

from collections.abc import Sequence
from pathlib import Path

from snaketune.stages.cache import libraries
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.declaration import Cost, Stage
from snaketune.stages.outcome import Outcome
from snaketune.stages.specs import ReportSpec

STAGE = Stage(
    module=__name__,
    spec=ReportSpec,
    payload="pages",
    job_name="",
    files=("manifests", "runs", "compared", "compared_runs", "compared_evals"),
    libraries=libraries.always("matplotlib", "jinja2"),
    cost=Cost(mb=1500, minutes=10),
    further_files="snaketune.report.compare.earlier_results",
    link="best",
)


def build(spec: ReportSpec, work: WorkFolder, **files: Sequence[Path]) -> Outcome:
    """Fill `work.payload` with the files that `pages_for` lists for the stages of the manifests; see `write_pages`."""
    from snaketune.report.page_files import write_pages

    return write_pages(spec, work, **files)
