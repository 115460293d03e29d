"""Where jobs run, other than this machine as it is: in an image, with a default storage, in several processes."""

import os

from snakemake.settings.types import DeploymentMethod, ExecMode

from snaketune.publishing.convert import find_converter
from snaketune.stages.host.launch_command import check_installed, check_limit, check_nodes, describe_launch

# A process that runs single jobs for the one that planned them decides nothing.
PLANS = workflow.exec_mode == ExecMode.DEFAULT
METHODS = workflow.deployment_settings.deployment_method if workflow.deployment_settings else frozenset()
DEPLOYS = bool(METHODS & {DeploymentMethod.CONDA, DeploymentMethod.APPTAINER})
# A job that is shown its inputs by links needs all of them named.
LINKS_INPUTS = bool(workflow.storage_settings and workflow.storage_settings.default_storage_provider)
# What envs/Containerfile makes; where the rules come from a git repository, it is looked for in the working directory.
IMAGE = (PACKAGE_ROOT.parent if IS_CLONE else Path.cwd()) / "envs/snaketune.sif"
checked = set()


def image():
    """The image that jobs run in under `--sdm apptainer`; else none: Snakemake refuses blanks in its path even where it ignores it."""
    if DeploymentMethod.APPTAINER not in METHODS:
        return None
    # Of a job's files, apptainer shows those below the working directory. The package may be elsewhere.
    for variable in ("APPTAINER_BIND", "SINGULARITY_BIND"):
        os.environ[variable] = ",".join(filter(None, (os.environ.get(variable), str(PACKAGE_ROOT.parent))))
    return os.path.relpath(IMAGE)


def check_storage():
    """Refuse a default storage other than the working directory, which is on a volume that all jobs share (docs/platforms.md).

    Results would be where no manifest can be read while planning, nor half-done work be found, and what is stale be missed.
    """
    settings = workflow.storage_settings
    provider, prefix = settings.default_storage_provider, settings.default_storage_prefix
    if provider != "fs" or Path(prefix or "").resolve() != Path.cwd():
        raise WorkflowError(
            f"--default-storage-provider {provider} --default-storage-prefix {prefix}: results have to be in the working "
            f"directory, on a volume that all jobs share (fs, and {Path.cwd()}); docs/platforms.md says how"
        )


def check_before_run(job):
    """Refuse, before anything runs, a stale job that could never run; log what each node runs of a training in several processes."""
    if job.manifest in checked:
        return
    checked.add(job.manifest)
    requests.request(job)
    for line in describe_launch(job):
        logger.info(line)
    # Not where the graph is only drawn.
    runs = workflow.executor_plugin is not None and not workflow.dryrun
    if runs and DeploymentMethod.APPTAINER in METHODS and not IMAGE.exists():
        raise SnaketuneError(
            f"{IMAGE} isn't there, the image of --sdm apptainer; docs/platforms.md says how it is built"
        )
    if job.stage == "convert" and not DEPLOYS:
        find_converter()
    if not runs or "launch" not in STAGES[job.stage].operation:
        return
    # Pods know nothing of each other.
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
