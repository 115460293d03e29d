"""Platforms: images, default storages, and trainings in several processes; and the checks before a job runs."""

import os

from snakemake.settings.types import DeploymentMethod, ExecMode

from snaketune.publishing.convert import find_converter
from snaketune.stages.host.launch_command import check_installed, check_limit, check_nodes, describe_launch

# Only the main process plans; those that run single jobs don't.
PLANS = workflow.exec_mode == ExecMode.DEFAULT
METHODS = workflow.deployment_settings.deployment_method if workflow.deployment_settings else frozenset()
DEPLOYS = bool(METHODS & {DeploymentMethod.CONDA, DeploymentMethod.APPTAINER})
# If jobs see their inputs as links, every input must be listed.
LINKS_INPUTS = bool(workflow.storage_settings and workflow.storage_settings.default_storage_provider)
# The image that envs/Containerfile describes; if the rules come from a git repository, it is expected in the working directory.
IMAGE = (PACKAGE_ROOT.parent if IS_CLONE else Path.cwd()) / "envs/snaketune.sif"
checked = set()


def image():
    """Return the image for `--sdm apptainer`, otherwise None: Snakemake refuses blanks in its path even if it is unused."""
    if DeploymentMethod.APPTAINER not in METHODS:
        return None
    # apptainer binds the working directory; the package may be outside of it.
    for variable in ("APPTAINER_BIND", "SINGULARITY_BIND"):
        os.environ[variable] = ",".join(filter(None, (os.environ.get(variable), str(PACKAGE_ROOT.parent))))
    return os.path.relpath(IMAGE)


def check_storage():
    """Refuse a default storage other than the working directory on a shared volume (docs/platforms.md).

    Otherwise manifests couldn't be read while planning, so stale results would be missed, and unfinished work not be found.
    """
    settings = workflow.storage_settings
    provider, prefix = settings.default_storage_provider, settings.default_storage_prefix
    if provider != "fs" or Path(prefix or "").resolve() != Path.cwd():
        raise Error(
            f"--default-storage-provider {provider} --default-storage-prefix {prefix}: results have to be in the working "
            f"directory, on a volume that all jobs share (fs, and {Path.cwd()}); see docs/platforms.md"
        )


def check_before_run(job):
    """Raise an error if a stale job could never run; log what each node runs of a training in several processes."""
    if job.manifest in checked:
        return
    checked.add(job.manifest)
    requests.alone(job)
    for line in describe_launch(job):
        logger.info(line)
    # False if the graph is only drawn.
    runs = workflow.executor_plugin is not None and not workflow.dryrun
    if runs and DeploymentMethod.APPTAINER in METHODS and not IMAGE.exists():
        raise SnaketuneError(
            f"{IMAGE} doesn't exist, but --sdm apptainer needs this image; docs/platforms.md says how it is built"
        )
    if job.stage == "convert" and not DEPLOYS:
        find_converter()
    if not runs or "launch" not in STAGES[job.stage].operation:
        return
    # Kubernetes pods can't start processes on each other.
    if workflow.local_exec or workflow.executor_plugin.name == "kubernetes":
        check_nodes(job.operation)
    if workflow.local_exec:
        check_limit(job.operation, workflow.global_resources.get("gpu").value)
    if not DEPLOYS:
        check_installed(job.operation)


if LINKS_INPUTS:
    if PLANS:
        check_storage()

    # Inputs on the volume are linked into a pod, not copied.
    inputflags:
        access.sequential,
