"""Where jobs run, other than this machine as it is: in an image, with a default storage."""

# What envs/Containerfile makes; where the rules come from a git repository, it is looked for in the working directory.
IMAGE = (PACKAGE_ROOT.parent if IS_CLONE else Path.cwd()) / "envs/snaketune.sif"


def image():
    """The image that jobs run in under `--sdm apptainer`; else none: Snakemake refuses blanks in its path even where it ignores it."""
    if DeploymentMethod.APPTAINER not in METHODS:
        return None
    # Of a job's files, apptainer shows those below the working directory. The package may be elsewhere.
    workflow.deployment_settings.apptainer_args += f" --bind {shlex.quote(str(PACKAGE_ROOT.parent))}"
    return os.path.relpath(IMAGE)


def check_image():
    """Refuse to run where the image of `--sdm apptainer` isn't there, before anything runs."""
    runs = workflow.executor_plugin is not None and not workflow.dryrun
    if runs and DeploymentMethod.APPTAINER in METHODS and not IMAGE.exists():
        raise WorkflowError(
            f"{IMAGE} isn't there, the image of --sdm apptainer; docs/platforms.md says how it is built"
        )


def check_storage():
    """Refuse a default storage other than the working directory, which is on a volume that all jobs share (docs/platforms.md).

    Results would be where no manifest can be read while planning, nor half-done work be found, and what is stale be missed.
    """
    settings = workflow.storage_settings
    provider = settings and settings.default_storage_provider
    if provider is None:
        return
    prefix = settings.default_storage_prefix
    if provider != "fs" or Path(prefix or "").resolve() != Path.cwd():
        raise WorkflowError(
            f"--default-storage-provider {provider} --default-storage-prefix {prefix}: results have to be in the working "
            f"directory, on a volume that all jobs share (fs, and {Path.cwd()}); docs/platforms.md says how"
        )


if DECIDES:
    check_storage()

if workflow.storage_settings and workflow.storage_settings.default_storage_provider:

    # A job is shown by links what it reads on the volume, instead of copies.
    inputflags:
        access.sequential,
