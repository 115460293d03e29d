"""The `report` stage: an HTML report of all results, and figures and tables for Snakemake's own report."""

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
    files=("manifests", "runs"),
    libraries=libraries.always("matplotlib", "jinja2"),
    cost=Cost(mb=1500, minutes=10),
    link="best",
)


def build(spec: ReportSpec, work: WorkFolder, *, manifests: list[Path], runs: list[Path]) -> Outcome:
    """Fill `work.payload` with the files that `pages_for` lists for the stages of the manifests.

    Args:
        manifests: Manifests of all results to report on, in the order of `spec.jobs`.
        runs: Their run.json files, each beside its manifest. Where one is missing, its values are shown as missing.
    Raises:
        SnaketuneError: If a manifest or payload can't be read.
    """
    from snaketune.report.data.results import ResultSet
    from snaketune.report.page_files import write_pages

    return write_pages(spec, work, ResultSet(spec.jobs, manifests, runs))
