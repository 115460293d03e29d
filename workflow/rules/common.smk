"""The config as a plan of jobs, and the helpers by which rules look their own job up."""

import os
import shlex
import sys
from pathlib import Path

from snakemake.exceptions import WorkflowError

PACKAGE_ROOT = Path(workflow.basedir) / "workflow"
sys.path.insert(0, str(PACKAGE_ROOT))
# Jobs run in their rule's environment, where the package itself isn't installed. The prefix replaces Snakemake's own.
# Idle threads sleep instead of spinning: nothing lost alone, and no collapse when something else wants a core.
# Snakemake formats the prefix too, so braces are doubled.
# A config that was given is told, so that a message can name the whole command that heals a file.
GIVEN_CONFIG = " ".join(shlex.quote(str(path)) for path in workflow.overwrite_configfiles)
shell.prefix(
    (
        "set -euo pipefail; export OMP_WAIT_POLICY=PASSIVE "
        f"PYTHONPATH={shlex.quote(str(PACKAGE_ROOT))} SNAKETUNE_CONFIG={shlex.quote(GIVEN_CONFIG)}; "
    )
    .replace("{", "{{")
    .replace("}", "}}")
)

from snaketune.artifacts.code import code_digest
from snaketune.config.base import NAME_PATTERN
from snaketune.config.load import load
from snaketune.config.plan import Plan
from snaketune.config.specs import canonical
from snaketune.errors import SnaketuneError
from snaketune.report.pages import pages_of
from snaketune.stages import STAGES

try:
    # Relative, so that a moved repository has the same input files as before.
    plan = Plan(*load(config), root=Path(os.path.relpath(workflow.basedir)))
except SnaketuneError as error:
    raise WorkflowError(str(error)) from None


wildcard_constraints:
    name=NAME_PATTERN,
    evaluation=NAME_PATTERN,
    model=NAME_PATTERN,
    part=r"\d+-of-\d+",


def job_of(stage, wildcards):
    """The planned job behind a rule's wildcards."""
    try:
        return plan.job(stage, "/".join(wildcards))
    except SnaketuneError as error:
        raise WorkflowError(str(error)) from None


def inputs_of(stage):
    """Manifests of what the job reads, by role; payload folders as ancient, since manifests speak for them."""

    def inputs(wildcards):
        job = job_of(stage, wildcards)
        found = {role: [made.manifest for made in jobs] for role, jobs in job.artifacts.items()}
        payloads = [ancient(made.payload) for jobs in job.artifacts.values() for made in jobs]
        return {**found, **{role: list(files) for role, files in job.files.items()}, "payloads": payloads}

    return inputs


def spec_of(stage):
    """The slice of the config that the job reads, in its one canonical spelling."""

    def spec(wildcards):
        return canonical(job_of(stage, wildcards).spec)

    return spec


def code_of(stage):
    """Digest of the code that shapes the stage's result."""
    return code_digest(STAGES[stage].module)


def operation_of(stage, key):
    """How the job is run. As a resource and not a param, so that an edit reruns nothing."""

    def operation(wildcards):
        value = getattr(job_of(stage, wildcards).operation, key)
        # Resources are numbers or texts.
        return str(value).lower() if isinstance(value, bool) else value

    return operation


def report_spec(wildcards):
    """The report's slice; a function, since Snakemake would look for wildcards in a plain text."""
    return canonical(plan.job("report", "report").spec)


def reported_jobs():
    """All jobs that the report tells of."""
    return [job for jobs in plan.job("report", "report").artifacts.values() for job in jobs]


def report_files():
    """What the report consists of for this config."""
    return ["results/report/manifest.json", *(f"results/report/pages/{page}" for page in pages_of(plan))]
