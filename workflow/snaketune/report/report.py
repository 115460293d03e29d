"""The `report` stage: an HTML report of all results, and figures and tables for Snakemake's own report."""

from snaketune.stages.declaration import Cost, Stage
from snaketune.stages.specs import ReportSpec


def further_files(spec: ReportSpec) -> dict[str, list[str]]:
    """The files of earlier results that the report compares with, by role."""
    # It reads the table of stages, which imports this module.
    from snaketune.report.compare.earlier_results import compared_files

    return compared_files(spec.compare)


STAGE = Stage(
    module=__name__,
    work="snaketune.report.page_files",
    spec=ReportSpec,
    payload="pages",
    job_name="",
    files=("manifests", "runs", "compared", "compared_runs", "compared_evals"),
    libraries=("matplotlib", "jinja2"),
    cost=Cost(mb=1500, minutes=10),
    further_files=further_files,
    link="best",
)
