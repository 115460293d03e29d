"""The plan of the large config."""

import pytest

from snaketune.config.load import load
from snaketune.stages.graph import plan_jobs
from tests.stages.plan.large import CONFIG, without_digest, write_files


@pytest.fixture(scope="package")
def planned(tmp_path_factory):
    """The jobs, in their order."""
    folder = tmp_path_factory.mktemp("large")
    write_files(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return plan_jobs(*load(CONFIG))


@pytest.fixture(scope="package")
def jobs(planned):
    """The jobs by key; names without their digests."""
    return {without_digest(job.key): job for job in planned}
