"""The `report` stage: an HTML report of all results, and figures and tables for Snakemake's own report."""

from collections.abc import Sequence
from pathlib import Path

from snaketune.stages.cache import libraries
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.declaration import Cost, Stage
from snaketune.stages.outcome import Outcome
from snaketune.stages.specs import ReportSpec


def further_files(spec: ReportSpec) -> dict[str, list[str]]:
    """The files of earlier results that the report compares with, by role."""
    # It reads the table of stages, which imports this module.
    from snaketune.report.compare.earlier_results import compared_files

    return compared_files(spec.compare)


STAGE = Stage(
    module=__name__,
    spec=ReportSpec,
    payload="pages",
    job_name="",
    files=("manifests", "runs", "compared", "compared_runs", "compared_evals"),
    libraries=libraries.always("matplotlib", "jinja2"),
    cost=Cost(mb=1500, minutes=10),
    further_files=further_files,
    link="best",
)


def build(
    spec: ReportSpec,
    work: WorkFolder,
    *,
    manifests: list[Path],
    runs: list[Path],
    compared: Sequence[Path] = (),
    compared_runs: Sequence[Path] = (),
    compared_evals: Sequence[Path] = (),
) -> Outcome:
    """Fill `work.payload` with the files that `pages_for` lists for the stages of the manifests.

    Args:
        manifests: Manifests of all results to report on, in the order of `spec.jobs`.
        runs: Their run.json files, each beside its manifest. Where one is missing, its values are shown as missing.
        compared, compared_runs: Manifests and run.json files of earlier trainings, in the order of `spec.compare`.
        compared_evals: Manifests of the evaluations of their models.
    Raises:
        SnaketuneError: If a manifest or payload can't be read.
    """
    from snaketune.report.compare.earlier_runs import EarlierRuns
    from snaketune.report.data.results import ResultSet
    from snaketune.report.page_files import write_pages

    results = ResultSet(spec.jobs, manifests, runs)
    return write_pages(spec, work, results, EarlierRuns(results, spec.compare, compared, compared_runs, compared_evals))
