"""The config as a graph of jobs, and the helpers by which rules look their own job up."""

import json
import os
import shlex
from pathlib import Path

from snakemake.exceptions import WorkflowError
from snakemake.logging import logger
from snakemake.settings.types import DeploymentMethod, ExecMode, RerunTrigger

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

from snaketune.stages.code import code_digest
from snaketune.stages.libraries import installed_version
from snaketune.stages.status import Results, made_from, told_of
from snaketune.config.base import NAME_PATTERN
from snaketune.config.load import load
from snaketune.config.shipped_tasks import check_shipped_tasks
from snaketune.stages.graph import JobGraph
from snaketune.stages.jobs import RESULTS, folder_of
from snaketune.stages.linked import check_place
from snaketune.stages.launches import check_installed, check_limit, check_nodes, planned
from snaketune.stages.specs import canonical
from snaketune.errors import SnaketuneError
from snaketune.publishing.convert import find_converter
from snaketune.report.pages import files_to_judge, pages_of
from snaketune.stages.table import STAGES, option

try:
    graph = JobGraph(*load(config))
except SnaketuneError as error:
    raise WorkflowError(str(error)) from None


wildcard_constraints:
    name=NAME_PATTERN,
    evaluation=NAME_PATTERN,
    model=NAME_PATTERN,
    variant=NAME_PATTERN,
    part=r"\d+-of-\d+",
    repeat=r"\d+",


def job_of(stage, wildcards):
    """The job that a rule's wildcards name."""
    try:
        return graph.job(stage, "/".join(wildcards))
    except SnaketuneError as error:
        raise WorkflowError(str(error)) from None


def asked_for(job):
    """Whether the user forces the job, so that what is made from it runs too."""
    settings = workflow.dag_settings
    asked = {str(name) for name in (*settings.forcerun, *(settings.targets if settings.forcetargets else ()))}
    # A module's rule may have another name.
    rule_name = getattr(rules, job.stage).rule.name
    return settings.forceall or not asked.isdisjoint((rule_name, job.manifest, job.payload, job.run))


# A process that runs one job for another one that planned it leaves all decisions to that one.
DECIDES = workflow.exec_mode == ExecMode.DEFAULT
# Not there where a file is only checked or drawn.
METHODS = workflow.deployment_settings.deployment_method if workflow.deployment_settings else frozenset()
DEPLOYS = METHODS & {DeploymentMethod.CONDA, DeploymentMethod.APPTAINER}
if DECIDES and not DEPLOYS:
    try:
        check_shipped_tasks(graph.config)
    except SnaketuneError as error:
        raise WorkflowError(str(error)) from None
# Looked at once, not for each job.
codes = {stage: code_digest(made.module) for stage, made in STAGES.items()}
results = Results(
    code_of=codes.__getitem__,
    asked_for=asked_for,
    # In environments of their own, jobs find other versions than the ones here.
    installed=(lambda library: None) if DEPLOYS else installed_version,
    reruns_on=graph.config.reruns_on,
)
launches_told = set()


def let_manifests_decide():
    """Snakemake orders and runs the jobs, but what is stale is for the manifests to say (stages/status.py).

    Its own notes could only add jobs that then find nothing to compute, and miss others where the notes are lost. Called when it
    asks for the first inputs: before that, neither the settings nor the graph are there; what needs to run is worked out after.
    """
    workflow.dag_settings.rerun_triggers = frozenset([RerunTrigger.MTIME])
    # A manifest is written last, so a result that has one is complete.
    workflow.dag.ignore_incomplete = True


def tell_launch(job):
    """What each node will run of a training in several processes; refused before anything runs where it couldn't be started."""
    if job.manifest in launches_told:
        return
    launches_told.add(job.manifest)
    requests.ask(job)
    for line in planned(job):
        logger.info(line)
    # Not where the graph is only drawn.
    if workflow.executor_plugin is None or workflow.dryrun or "launch" not in STAGES[job.stage].operation:
        return
    # Pods know nothing of each other.
    if workflow.local_exec or workflow.executor_plugin.name == "kubernetes":
        check_nodes(job.operation)
    if workflow.local_exec:
        check_limit(job.operation, workflow.global_resources.get("gpu").value)
    if not DEPLOYS:
        check_installed(job.operation)


def mark_of(job):
    """How the job's inputs are marked: those of a current result are ancient, since nothing has changed in them, however new
    they look. A result that is stale by itself is forced, and the reason is told."""
    if not DECIDES:
        return ancient
    let_manifests_decide()
    try:
        for line in results.tell(job):
            logger.info(line)
        standing = results.of(job)
        if not standing.current:
            check_image()
            tell_launch(job)
    except SnaketuneError as error:
        raise WorkflowError(str(error)) from None
    if standing.why:
        # Here, where Snakemake asks for the inputs of just the jobs that it plans; `--forcerun` would make them targets too.
        # As a file of the default storage, if there is one.
        workflow.dag.forcefiles.add(workflow.inputfile(job.manifest))
    return ancient if standing.current else str


# Where results are shown to each job by themselves, it has to name them all.
SHOWN = bool(workflow.storage_settings and workflow.storage_settings.default_storage_provider)


def through(stage):
    """The roles of a stage that Snakemake isn't asked to wait for, as another input does."""
    return () if SHOWN else STAGES[stage].through


def inputs_of(stage):
    """What the job reads, by role: manifests and files from outside; and the payloads that the manifests speak for."""

    def inputs(wildcards):
        job = job_of(stage, wildcards)
        mark = mark_of(job)
        reads = {role: jobs for role, jobs in job.artifacts.items() if role not in through(stage)}
        made = {role: [mark(one.manifest) for one in jobs] for role, jobs in reads.items()}
        files = {role: [mark(file) for file in files] for role, files in job.files.items()}
        payloads = [mark(one.payload) for jobs in reads.values() for one in jobs]
        # What says how it runs is waited for where it runs, and is no reason to run. Not ancient: of a job below one that runs
        # Snakemake doesn't ask any more whether its own output is there, and leaves it out if what it waits for is ancient.
        after = [] if DECIDES and results.of(job).current else [mark(one.manifest) for one in job.after]
        # Two jobs that make the same run one after the other.
        same = [mark(graph.same_as[job.manifest].manifest)] if job.manifest in graph.same_as else []
        return {**made, **files, "payloads": payloads, "after": after, "same": same}

    return inputs


def told_inputs(stage):
    """What a job reads that tells of results."""

    def inputs(wildcards):
        job = job_of(stage, wildcards)
        mark = mark_of(job)
        try:
            told = {role: [mark(path) for path in paths] for role, paths in told_of(job).items()}
        except SnaketuneError as error:
            raise WorkflowError(str(error)) from None
        return {**told, "payloads": [mark(one.payload) for one in made_from(job)]}

    return inputs


def outputs_of(stage):
    """Where the stage's jobs publish, as patterns."""
    folder = folder_of(stage, STAGES[stage].name)
    return {
        "manifest": f"{folder}/manifest.json",
        "payload": directory(f"{folder}/{STAGES[stage].payload}"),
        "run": f"{folder}/run.json",
    }


def link_to_best():
    """The link to the model of the best run, where the config says by what."""
    if not graph.config.report.sort_by:
        return {}
    link = RESULTS / STAGES["report"].links
    try:
        check_place(link)
    except SnaketuneError as error:
        raise WorkflowError(str(error)) from None
    return {"best": directory(str(link))}


def log_of(stage):
    """The log of one job, as a pattern."""
    return f"{folder_of(f'logs/{stage}', STAGES[stage].name)}.log"


def params_of(stage):
    """What makes a job's result, besides its inputs: its slice of the config, and the code."""

    def spec(wildcards):
        return canonical(job_of(stage, wildcards).spec)

    return {
        "spec": spec,
        "code": codes[stage],
        "reruns_on": graph.config.reruns_on.get(stage, "code"),
        **operation_of(stage),
        **{role: manifests_of(stage, role) for role in through(stage)},
    }


def manifests_of(stage, role):
    """Of the results that a job reads in a role."""

    def manifests(wildcards):
        return [one.manifest for one in job_of(stage, wildcards).artifacts[role]]

    return manifests


def operation_of(stage):
    """How a job is run. None of it shapes a result, and no param reruns anything: manifests decide."""

    def param_of(key):
        def param(wildcards):
            value = getattr(job_of(stage, wildcards).operation, key)
            return str(value).lower() if isinstance(value, bool) or value is None else value

        return param

    return {key: param_of(key) for key in STAGES[stage].operation}


def command_of(stage):
    """The command of one job: what it is told, what it reads by role, how it is run, where it publishes."""
    made = STAGES[stage]
    held = {role: "params" if role in through(stage) else "input" for role in (*made.one, *made.many, *made.files)}
    inputs = "".join(f" {option(role)} {{{where}.{role}:q}}" for role, where in held.items())
    operation = "".join(f" {option(key)} {{params.{key}:q}}" for key in made.operation)
    if made.launcher:
        # The same for all of them. Snakemake formats the command, so braces are doubled.
        tracking = shlex.quote(canonical(graph.config.tracking)).replace("{", "{{").replace("}", "}}")
        operation += f" --tracking {tracking}"
    # Told to end, a training leaves with a checkpoint, and its shell waits for that.
    waits = "trap '' TERM; " if made.launcher else ""
    told = (
        f"--spec {{params.spec:q}} --code {{params.code}} --reruns-on {{params.reruns_on}}{inputs}{operation}"
        " --out $(dirname {output.manifest:q})"
    )
    if made.by_file:
        # As a file, line by line: of hundreds of jobs it is more than a command line can hold.
        told = f"@<(printf '%s\\n' {told})"
    return f"{waits}OMP_NUM_THREADS={{threads}} RAYON_NUM_THREADS={{threads}} python -m snaketune {stage} {told} 2>&1 | tee {{log:q}}"


def calibrations(wildcards):
    """What is measured of all trainings, also of those whose portions are chosen by hand."""
    jobs = list(graph.stage("calibrate"))
    for job in jobs:
        mark_of(job)
    return [job.manifest for job in jobs]


def diagnoses(wildcards):
    """What the config's diagnoses found."""
    jobs = list(graph.stage("diagnosis"))
    if not jobs:
        raise WorkflowError("the config has no `diagnose:`; it says which run to look at, and what to try")
    for job in jobs:
        mark_of(job)
    return [path for job in jobs for path in (job.manifest, job.payload)]


def audits(wildcards):
    """A look at every run; of those that take the same time and memory, at one."""
    jobs = list(graph.stage("audit"))
    for job in jobs:
        mark_of(job)
    return [path for job in jobs for path in (job.manifest, job.payload)]


def previewed(wildcards):
    """The local files of all corpora; a preview is to be read, so it is made whenever it is a target."""
    if DECIDES:
        workflow.dag.forcefiles.add(workflow.inputfile("results/preview/preview.html"))
    return [file for job in graph.stage("corpus") for file in job.files["files"]]


def gguf_files(wildcards):
    """What `gguf:` names."""
    if not graph.config.gguf:
        raise WorkflowError("the config has no `gguf:`, so nothing is to be converted (docs/publishing.md)")
    try:
        # What jobs find in environments of their own is for them to say.
        if not DEPLOYS:
            find_converter()
    except SnaketuneError as error:
        raise WorkflowError(str(error)) from None
    return [path for job in graph.stage("convert") for path in (job.manifest, job.payload)]


def pushed(wildcards):
    """The models that `push:` names, and their cards."""
    if not graph.config.push:
        raise WorkflowError("the config has no `push:`, so nothing is to be pushed (docs/publishing.md)")
    jobs = [
        graph.job(stage, name)
        for kind, run in (push.model.split(":") for push in graph.config.push.values())
        for stage, name in ((kind, run), ("card", f"{kind}-{run}"))
    ]
    return {"manifests": [job.manifest for job in jobs], "payloads": [job.payload for job in jobs]}


def push_spec():
    """What `push:` says, as one text."""
    return json.dumps({name: push.model_dump() for name, push in graph.config.push.items()}, sort_keys=True)


def all_results(wildcards):
    """Everything that the config asks for."""
    last = graph.job("report", "")
    # First of all, so that what is stale is told in one list.
    mark_of(last)
    jobs = [*made_from(last), *graph.stage("card")]
    made = [path for job in jobs for path in (job.manifest, job.payload)]
    pages = (f"{last.payload}/{page}" for page in (*pages_of(graph), *files_to_judge(graph)))
    return [*made, last.manifest, *pages, *link_to_best().values()]
