"""What rules look up: jobs, inputs, resources and groups, and whether results are current."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import sys
from collections.abc import Callable
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snakemake.common import Rules
from snakemake.io import ancient, directory
from snakemake.iocontainers import Wildcards
from snakemake.logging import logger
from snakemake.settings.types import DAGSettings, DeploymentMethod, RerunTrigger

from snaketune.cluster import sbatch
from snaketune.cluster.job_endings import unfinished
from snaketune.cluster.pending_jobs import watch
from snaketune.cluster.resources import MAX_JOBS, TURN, ResourceRequests
from snaketune.cluster.site import read_site, site_file
from snaketune.cluster.submission_check import check
from snaketune.config.task_files import check_shipped_tasks
from snaketune.errors import SnaketuneError
from snaketune.locations import forget, is_local, recall
from snaketune.publishing.convert import find_converter
from snaketune.publishing.push import pushed_jobs
from snaketune.snakemake_adapter.checks import check_storage, plain_errors
from snaketune.snakemake_adapter.package import PACKAGE, Error
from snaketune.snakemake_adapter.slurm_executor import Partitions, check_account
from snaketune.snakemake_adapter.stale_locks import remove_stale_locks
from snaketune.snakemake_adapter.terminal import ending_lines, is_news, leaving_lines
from snaketune.stages.cache.status import made_from
from snaketune.stages.host.launch_command import check_installed, check_limit, check_nodes, describe_launch
from snaketune.stages.job import RESULTS, Job
from snaketune.stages.job_files import KNOWN
from snaketune.stages.links import check_link
from snaketune.stages.planner import Planner
from snaketune.stages.table import STAGES

# Snakemake imports this module in circles.
if TYPE_CHECKING:
    from snakemake.workflow import Workflow


class Adapter:
    """The jobs of a config, as the rules of one Snakefile look them up."""

    def __init__(self, workflow: Workflow, config: dict[str, Any], rules: Rules, package_root: Path):
        """Args: rules: those of the Snakefile, which a module's user may rename. package_root: from `package.package_root`."""
        self.workflow, self.rules, self.package_root = workflow, rules, package_root
        deployment = workflow.deployment_settings
        self.methods = deployment.deployment_method if deployment else frozenset[DeploymentMethod]()
        self.deploys = bool(self.methods & {DeploymentMethod.CONDA, DeploymentMethod.APPTAINER})
        # Only the main process plans; those that run single jobs don't.
        self.plans: bool = workflow.is_main_process
        # If jobs see their inputs as links, every input must be listed.
        storage = workflow.storage_settings
        self.links_inputs = bool(storage and storage.default_storage_provider)
        if storage and self.links_inputs and self.plans:
            check_storage(storage.default_storage_provider, storage.default_storage_prefix)
        self._sent_stages = set[str]()
        self._checked = set[str]()
        # Each is called once.
        self._start_planning, self._check_submissions = cache(self._write_job_files), cache(self._submit_whole_groups)
        with plain_errors():
            # Each plan asks stores anew; processes that run its jobs don't.
            if self.plans:
                forget()
            else:
                recall(KNOWN)
            self.planner = Planner(config, is_forced=self._is_forced, deploys=self.deploys)
            self.graph = self.planner.graph
            if self.plans and not self.deploys:
                check_shipped_tasks(self.graph.config)
            file = site_file()
            self.requests = ResourceRequests(
                self.graph.jobs.values(),
                read_site(file) if file else None,
                # Processes that run single jobs don't know what else runs.
                runs=lambda job: not self.plans or job.manifest in self._outputs_of_this_run,
            )
        self._on_slurm = bool(self.plans and self.requests.site and shutil.which("sbatch"))
        # In a group's job, trainings and evaluations run one after the other. Each group's job has one turn.
        if self.requests.site:
            workflow.register_resource(TURN, 1)
        if not self._sends:
            logger.addFilter(is_news)
        # Snakemake has no hook for the end of a dry run.
        atexit.register(self._print_estimates)

    # Of a rule

    def inputs_of(self, stage: str) -> Callable[[Wildcards], dict[str, Any]]:
        """Return an input function for a stage's rule. It returns a job's file, and the inputs of the job by role.

        Inputs of a current result are marked `ancient`: their content is unchanged, however new they are. Those of a stale one
        aren't, since Snakemake runs a job after another one only if it has an input from there that isn't ancient; nor are
        those of a group's jobs in the process that runs the group, as Snakemake would omit jobs that have old results.
        """

        def inputs(wildcards: Wildcards) -> dict[str, Any]:
            job = self._job(stage, wildcards)
            current = self._is_current(job) and (self._name_of(stage), *sorted(wildcards.items())) not in self._targets
            mark = ancient if current else str
            read: dict[str, list[str]] = {}
            if not current or self._lists_current:
                with plain_errors():
                    read = self.planner.inputs(job, every=self.links_inputs)
            job_file = str(self.planner.job_file(job))
            marked = {role: list(map(mark, paths)) for role, paths in read.items()}
            return marked | {"job": job_file if self.plans else ancient(job_file)}

        return inputs

    def spec_of(self, stage: str) -> Callable[[Wildcards], str]:
        """Return a function for the slice of the config that a job reads, as JSON. Snakemake records it; what is stale, the
        job file decides."""
        return lambda wildcards: json.dumps(self._job(stage, wildcards).plain_spec, sort_keys=True)

    def line_of(self, job: str) -> str | None:
        """Return what Snakemake prints of a job, with its wildcards, instead of a box of all that it has. None keeps the box:
        on a cluster it names the partition and what is requested."""
        return None if self._sends else f"{job}: at most {{resources.runtime}} min, {{resources.mem}}"

    def threads_of(self, stage: str) -> Callable[[Wildcards], int]:
        """Return a function for the CPUs of a job, per node; an error if it could never start."""

        def threads(wildcards: Wildcards) -> int:
            with plain_errors():
                return self.requests.threads(self._job(stage, wildcards))

        return threads

    def resources_of(self, stage: str) -> dict[str, Callable[[Wildcards, int], int | str | None]]:
        """Return the functions of all resources of a stage's jobs: memory in MB, minutes, GPUs on all nodes; on a cluster also
        account, partition options and GPU model. A function returns None if a job needs none."""

        def resource_of(name: str) -> Callable[[Wildcards, int], int | str | None]:
            def resource(wildcards: Wildcards, attempt: int) -> int | str | None:
                return self.requests.resources(self._job(stage, wildcards), attempt).get(name)

            return resource

        return {name: resource_of(name) for name in self.requests.names(stage)}

    def group_of(self, stage: str) -> Callable[[Wildcards], str | None]:
        """Return a function for the group whose jobs are sent to a cluster as one. Every rule whose jobs are sent has one."""
        self._sent_stages.add(stage)

        def group(wildcards: Wildcards) -> str | None:
            with plain_errors():
                self._check_submissions()
                return self.requests.group(self._job(stage, wildcards))

        return group

    def _job(self, stage: str, wildcards: Wildcards) -> Job:
        with plain_errors():
            return self.graph.job(stage, "/".join(wildcards))

    def _name_of(self, stage: str) -> str:
        name: str = getattr(self.rules, stage).rule.name
        return name

    # Of targets that aren't files

    def results_of(self, stage: str, key: str = "") -> Callable[[Wildcards], list[str]]:
        """Return an input function for all results of a stage. Args: key: the config key without which there are none."""
        return lambda wildcards: self._results([*self.graph.stage(stage)], key)

    def all_results(self, wildcards: Wildcards) -> list[str]:
        """Return everything that the config describes, besides the report's own files."""
        report = self.graph.job("report", "")
        # The report depends on all results, so what is stale is logged as one list.
        self._is_current(report)
        return self._results([*made_from(report), *self.graph.stage("merge"), *self.graph.stage("card")])

    def pushed(self, wildcards: Wildcards) -> list[str]:
        """Return the models that `push:` names, and their cards."""
        with plain_errors():
            return self._results(pushed_jobs(self.graph))

    def previewed(self, wildcards: Wildcards) -> list[str]:
        """Return the files of all corpora."""
        corpora = self.graph.config.corpora.values()
        named = (file for corpus in corpora for source in corpus.sources for file in source.files)
        return [file for file in named if is_local(file)]

    def link_to_best(self) -> dict[str, Any]:
        """Return the link to the best run's model, an output of the report if the config ranks runs."""
        link = STAGES["report"].link
        if not self.graph.config.report.sort_by or link is None:
            return {}
        with plain_errors():
            check_link(RESULTS / link)
        return {"best": directory(str(RESULTS / link))}

    def _results(self, jobs: list[Job], key: str = "") -> list[str]:
        """Return the manifests of jobs that have to be in Snakemake's graph, of one at least, since a target without inputs
        would run; stale jobs are logged."""
        if key and not jobs:
            raise Error(f"the config has no `{key}:`, so there is nothing to make; see config/README.md for its keys")
        listed = [job.manifest for job in jobs if not self._is_current(job) or self._lists_current]
        return listed or [job.manifest for job in jobs[:1]]

    # What is current

    def _is_forced(self, job: Job) -> bool:
        """Return True if the command line forces a job, so that everything made from it runs too."""
        settings = self._dag_settings
        names = (*settings.forcerun, *(settings.targets if settings.forcetargets else ()))
        forced = set(map(os.path.normpath, names))
        return settings.forceall or not forced.isdisjoint(
            (self._name_of(job.stage), job.manifest, job.payload, job.run)
        )

    def _is_current(self, job: Job) -> bool:
        """Return True if a result is current; otherwise log why it is stale. Error if its job could never run."""
        if not self.plans:
            return True
        with plain_errors():
            self._start_planning()
            for line in self.planner.results.log_lines(job):
                logger.info(line)
            current = self.planner.results.of(job).current
            if not current:
                self._check_before_run(job)
            return current

    def _write_job_files(self) -> None:
        """Write the job files of this run, before anything is looked up.

        The effect of triggers other than times is logged: a training has fewer inputs once its result is current. `--until` is
        refused for jobs that follow each other, since Snakemake would run only the first ones.
        """
        if self._has_other_triggers:
            logger.info(
                "note: by its other triggers Snakemake may list a job whose result is current (`set of input files has "
                "changed`); it computes nothing then. With --rerun-triggers mtime it isn't listed"
            )
        until = [stage for stage in STAGES if self._name_of(stage) in self._dag_settings.until]
        if until and (job := self.planner.first_following(until)):
            raise Error(
                f"--until {' '.join(until)} would end before {job.key}, which follows another {' or '.join(until)} job; name "
                f"results instead: snakemake {job.manifest}"
            )
        if self._runs:
            remove_stale_locks()
        self.planner.write_job_files(dry_run=not self._runs)

    @property
    def _sends(self) -> bool:
        """Whether jobs run elsewhere, so that what they print isn't seen here."""
        return bool(self.requests.site or self.links_inputs)

    @property
    def _dag_settings(self) -> DAGSettings:
        """The options that choose jobs. Snakemake has none for commands that build no graph, and these look up nothing."""
        settings = self.workflow.dag_settings
        assert settings is not None
        return settings

    @property
    def _runs(self) -> bool:
        """Whether jobs run; without an executor, the graph is only drawn."""
        return self.workflow.executor_plugin is not None and not self.workflow.dryrun

    @property
    def _has_other_triggers(self) -> bool:
        return self.workflow.rerun_triggers != {RerunTrigger.MTIME}

    @cached_property
    def _targets(self) -> set[tuple[Any, ...]]:
        """The jobs that this process was started to run, by rule and wildcards; none if it plans."""
        # Declared as texts; the command line has parsed them.
        targets: Any = self._dag_settings.target_jobs
        return {(target.rulename, *sorted(target.wildcards_dict.items())) for target in targets}

    @cached_property
    def _lists_current(self) -> bool:
        """Whether Snakemake's graph has to hold current results that no stale job reads.

        To run stale jobs it needn't: everything that a current result is made of is current too, and thousands of results take
        seconds. The graph is whole if it is drawn, touched or divided, if Snakemake itself may find a job to run (by other
        triggers than times, or since it was killed while the job ran), and if rules of another workflow may make files that
        ours read.
        """
        workflow, persistence = self.workflow, self.workflow.persistence
        assert persistence is not None
        return (
            not self.plans
            or self.links_inputs
            or workflow.executor_plugin is None
            or workflow.touch
            or self._dag_settings.batch is not None
            or self._has_other_triggers
            or any(path.is_file() for path in Path(persistence.path, "incomplete").rglob("*"))
            or not all(Path(rule.snakefile).is_relative_to(self.package_root) for rule in workflow.rules)
        )

    # Checks before jobs run

    def image(self) -> str | None:
        """Return the image for `--sdm apptainer`, otherwise None: Snakemake refuses blanks in its path even if unused."""
        if DeploymentMethod.APPTAINER not in self.methods:
            return None
        # apptainer binds the working directory; the package may be outside of it.
        for variable in ("APPTAINER_BIND", "SINGULARITY_BIND"):
            os.environ[variable] = ",".join(filter(None, (os.environ.get(variable), str(self.package_root.parent))))
        return os.path.relpath(self._image)

    @property
    def _image(self) -> Path:
        """What envs/Containerfile describes; in the working directory if the rules come from a git repository."""
        is_clone = self.package_root.samefile(PACKAGE.parent)
        return (self.package_root.parent if is_clone else Path.cwd()) / "envs/snaketune.sif"

    def _check_before_run(self, job: Job) -> None:
        """Raise SnaketuneError if a stale job could never run; log what each node runs of a training in several processes."""
        if job.manifest in self._checked:
            return
        self._checked.add(job.manifest)
        self.requests.alone(job)
        for line in describe_launch(job):
            logger.info(line)
        if self._runs and DeploymentMethod.APPTAINER in self.methods and not self._image.exists():
            raise SnaketuneError(
                f"{self._image} doesn't exist, but --sdm apptainer needs this image; docs/platforms.md says how it is built"
            )
        if job.stage == "convert" and not self.deploys:
            find_converter()
        if not self._runs or "launch" not in STAGES[job.stage].operation:
            return
        # Kubernetes pods can't start processes on each other.
        plugin = self.workflow.executor_plugin
        if self.workflow.local_exec or (plugin and plugin.name == "kubernetes"):
            check_nodes(job.operation)
        if self.workflow.local_exec:
            gpus = self.workflow.global_resources.get("gpu").value
            check_limit(job.operation, gpus if isinstance(gpus, int) else None)
        if not self.deploys:
            check_installed(job.operation)

    def _submit_whole_groups(self) -> None:
        """Raise SnaketuneError if SLURM would refuse anything that this run sends; tell Snakemake to send groups whole."""
        # By default, Snakemake sends only jobs as one that depend on each other.
        settings = self.workflow.group_settings
        assert settings is not None
        settings.group_components = {**settings.group_components, **dict.fromkeys(self.requests.groups, MAX_JOBS)}
        site, file = self.requests.site, site_file()
        if self._on_slurm and site and file:
            submissions = self.requests.submissions(self._sent_stages)
            if submissions and site.account:
                check_account(site.account, file, logger)
            partition_of = Partitions(file).best
            check(self.requests, submissions, partition_of, logger)

    @cached_property
    def _outputs_of_this_run(self) -> set[str]:
        """The files that are made. Snakemake knows them when its graph is complete, before it looks up groups."""
        dag = self.workflow.dag
        assert dag is not None
        return {str(path) for job in dag.needrun_jobs(exclude_finished=False) for path in job.output}

    # Hooks

    def on_start(self) -> None:
        """Log why jobs wait, for hours perhaps. Processes that run single jobs on a cluster don't run hooks."""
        if not self.workflow.local_exec:
            watch(logger.info)
            if self._on_slurm:
                sbatch.install(logger.warning)

    def on_error(self) -> None:
        """Log the jobs that a cluster ended."""
        if self._on_slurm:
            for line in unfinished(Path(job.folder) for job in self.graph.jobs.values()):
                logger.error(line)

    def on_success(self) -> None:
        """Log the stale jobs that Snakemake skipped though no option excludes them; and, after a report, what was made."""
        settings = self._dag_settings
        if not (settings.until or settings.omit_from) and (not_run := self.planner.not_run()):
            logger.warning(f"stale, and not run: {', '.join(not_run)}; run again")
        report = self.graph.job("report", "")
        if report.manifest in self._outputs_of_this_run:
            for line in ending_lines(
                report, Path(os.path.relpath(self.package_root.parent / "resources/serve/chat.py"))
            ):
                logger.info(line)

    def _print_estimates(self) -> None:
        """Print what the jobs of a dry run would take, and how many SLURM jobs it would submit."""
        if not (self.workflow.dryrun and self.workflow.dag):
            return
        if jobs := [job for job in self.graph.jobs.values() if job.manifest in self._outputs_of_this_run]:
            print(f"At most, by estimate, one job after the other:\n{self.requests.summary(jobs)}", file=sys.stderr)
        for line in leaving_lines(jobs):
            print(line, file=sys.stderr)
        names = sorted(self.requests.submissions(self._sent_stages))
        if names:
            print(f"As {len(names)} SLURM jobs: {', '.join(names)}.", file=sys.stderr)


def set_default_target(workflow: Workflow, rules: Rules) -> None:
    """Make the included rule `all` the default target. In a module, the rule may be renamed or left out."""
    if workflow.is_rule(rules.all.rule.name):
        workflow.default_target = rules.all.rule.name
