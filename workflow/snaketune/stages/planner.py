"""The planner, which Snakemake's rules query: the jobs of a config, their inputs, and which results are stale."""

from collections.abc import Callable, Collection
from functools import cache, cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from snaketune.config.load import load
from snaketune.errors import SnaketuneError
from snaketune.locations import facts_of, is_local, remember
from snaketune.stages.cache.code_digest import Modules
from snaketune.stages.cache.libraries import installed_version
from snaketune.stages.cache.status import Results, inputs_by_role, made_from
from snaketune.stages.graph import JobGraph
from snaketune.stages.job import Job
from snaketune.stages.job_files import (
    DRY_RUN,
    FORCED,
    KNOWN,
    JobFile,
    changed_at,
    job_file_of,
    lock_job_files,
    write_job_file,
)
from snaketune.stages.table import STAGES


class Planner:
    """The jobs of one config (`graph`), compared with the results on disk (`results`)."""

    def __init__(self, config: dict[str, Any], *, is_forced: Callable[[Job], bool], deploys: bool):
        """SnaketuneError if the config is invalid.

        Args:
            config: as read from YAML.
            is_forced: whether the user forces a job (`--forcerun`).
            deploys: whether jobs run in environments of their own, with other versions of libraries.
        """
        self.graph = JobGraph(*load(config))
        self.results = Results(
            code_of=lambda stage: self._codes[stage],
            is_forced=is_forced,
            installed=(lambda library: None) if deploys else cache(installed_version),
            reruns_on=self.graph.config.reruns_on,
        )
        self._files: dict[str, Path] = {}
        self._to_run: dict[str, Job] = {}

    @cached_property
    def _codes(self) -> dict[str, str]:
        """Digest of each stage's code; not computed in processes that run single jobs."""
        modules = Modules()
        return {stage: modules.digest(declaration.module) for stage, declaration in STAGES.items()}

    def write_job_files(self, *, dry_run: bool) -> None:
        """Write the files of all jobs at once: Snakemake lists a folder on first access, and misses files written later.

        SnaketuneError if they can't be written, or another snakemake runs here with another config. Args: dry_run: whether
        nothing runs, so that files which another run reads stay unchanged.
        """
        holds = not dry_run and lock_job_files()
        if holds:
            remember(KNOWN)
        for key, job in self.graph.jobs.items():
            path = self._files[job.key] = job_file_of(*key)
            try:
                content, stale = self._content(job), self._why(job)
            except SnaketuneError:
                # A result to compare with is missing: an error of the report job, raised when its inputs are looked up.
                continue
            if not write_job_file(path, content, stale, keep_time=not holds, keep_content=not holds):
                if not dry_run:
                    raise SnaketuneError(
                        f"{path}: another snakemake runs here, with another config or code; wait until it has ended, or run "
                        "this one in another folder (--directory)"
                    )
                path = self._files[job.key] = job_file_of(*key, DRY_RUN)
                write_job_file(path, content, stale, keep_time=True)

    def inputs(self, job: Job, *, every: bool) -> dict[str, list[str]]:
        """The paths that the job waits for, by role; SnaketuneError if a result to compare with doesn't exist.

        Args: every: include what another input implies: roles (`Stage.transitive`), and the payload beside each manifest.
        """
        implied = () if every else STAGES[job.stage].transitive
        # Remote files aren't Snakemake's inputs: the job file says whether they have changed.
        paths = {role: [*filter(is_local, files)] for role, files in inputs_by_role(job).items() if role not in implied}
        if every:
            paths["payloads"] = [upstream.payload for upstream in _decisive(job)]
        if not self.results.of(job).current:
            self._to_run[job.key] = job
            # These affect how it runs, and are no reason to run it.
            paths["after"] = [upstream.manifest for upstream in job.after]
            # Of two jobs with the same result, the second reuses that of the first.
            if first := self.graph.same_as.get(job.manifest):
                paths["same"] = [first.manifest]
        return paths

    def job_file(self, job: Job) -> Path:
        return self._files.get(job.key) or job_file_of(job.stage, job.name)

    def first_following(self, stages: Collection[str]) -> Job | None:
        """A stale job of these stages that waits for another one, as a run for its snapshot; None without one."""
        waits: dict[str, bool] = {}

        def follows(job: Job) -> bool:
            """Whether a stale job of the stages is above."""
            if job.manifest not in waits:
                above = [
                    upstream for upstream in (*made_from(job), *job.after) if not self.results.of(upstream).current
                ]
                waits[job.manifest] = any(upstream.stage in stages or follows(upstream) for upstream in above)
            return waits[job.manifest]

        jobs = (job for job in self.graph.jobs.values() if job.stage in stages)
        stale = (job for job in jobs if not self.results.of(job).current)
        return next((job for job in stale if follows(job)), None)

    def not_run(self) -> list[str]:
        """The stale jobs whose inputs were looked up and whose results are still older than their job files."""
        jobs = self._to_run.items()
        return [key for key, job in jobs if changed_at(Path(job.manifest)) < changed_at(self.job_file(job))]

    def _content(self, job: Job) -> JobFile:
        stage, config = STAGES[job.stage], self.graph.config
        return JobFile(
            stage=job.stage,
            out=job.folder,
            spec=job.plain_spec,
            inputs={role: tuple(paths) for role, paths in inputs_by_role(job).items() if paths},
            remote={url: facts.identity for url, facts in facts_of(chain(*job.files.values())).items()},
            code=self._codes[job.stage],
            reruns_on=config.reruns_on.get(job.stage, "code"),
            operation=job.operation.model_dump(mode="json", include=set(stage.operation)),
            **({"tracking": config.tracking} if stage.launcher else {}),  # pyrefly: ignore[bad-argument-type]
        )

    def _why(self, job: Job) -> tuple[str, ...] | None:
        """Why the job's result isn't current; None if it is."""
        status = self.results.of(job)
        if status.current:
            return None
        if status.manifest is None and not status.why:
            return ("missing",)
        above = tuple(
            f"{upstream.key} isn't current" for upstream in _decisive(job) if not self.results.of(upstream).current
        )
        return (*(status.why or above), *([FORCED] if self.results.is_forced(job) else []))


def _decisive(job: Job) -> list[Job]:
    """The jobs whose results decide about that of the job: those that it reads, and the race that may pause it."""
    return [*made_from(job), *([job.race] if job.race else [])]
