"""Projects of benchmarks: a config, and a folder with the results of its jobs, which run in this process or by commands."""

import shutil
import sys
from collections.abc import Sequence
from contextlib import chdir, nullcontext
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

from snaketune.artifacts.manifest import Artifact
from snaketune.config.load import load
from snaketune.stages.cache.status import inputs_by_role, made_from
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.graph import JobGraph
from snaketune.stages.job import Job, result_at
from snaketune.stages.job_files import JobFile, job_file_of, write_job_file
from snaketune.stages.loaded_job import LoadedJob, read_job
from snaketune.stages.outcome import Outcome
from snaketune.stages.run import run
from snaketune.stages.table import STAGES

ROW_LENGTH = 1024
# What a run needs where nothing is trained.
UNTRAINED = {
    "base": {"hidden_size": 32, "intermediate_size": 64, "layers": 2, "heads": 2},
    "training": {"learning_rate": 1e-4},
}


def started(folder: Path | str) -> WorkFolder:
    """Return a work folder in which a stage's `build` can begin."""
    work = WorkFolder(Path(folder))
    work.start()
    return work


@dataclass(frozen=True, kw_only=True)
class Project:
    """A config with an SFT run `start` and its tokenizer `shared`, and the folder, as `snakemake` would run in, that its paths
    are relative to."""

    folder: Path
    config: dict[str, Any]

    @property
    def tokenizer(self) -> Path:
        return self.folder / "results/tokenizer/shared/tokenizer"

    @property
    def precision(self) -> str:
        return self.config["sft"]["start"]["training"]["precision"]

    def job(self, stage: str, name: str) -> Job:
        with chdir(self.folder):
            return JobGraph(*load(self.config)).job(stage, name)

    def pack(self, stage: str = "sft", run_name: str = "start") -> Job:
        """Return the job that makes the rows of a run."""
        return self.job(stage, run_name).artifacts["pack"][0]

    def result(self, job: Job) -> Artifact:
        return result_at(self.folder / job.manifest)

    def missing(self, job: Job) -> list[Job]:
        """Return the jobs that have no result yet, of this one and those that it needs, each after those that it reads."""
        if (self.folder / job.manifest).is_file():
            return []
        needed = [one for made in made_from(job) for one in self.missing(made)]
        return list({one.key: one for one in [*needed, job]}.values())

    def make(self, job: Job) -> Artifact:
        """Make a job's result and those that it needs in this process, unless they exist; return it."""
        for one in self.missing(job):
            stage = STAGES[one.stage]
            launcher = (
                patch.object(import_module(stage.launcher), "launch", _build) if stage.launcher else nullcontext()
            )
            with chdir(self.folder), launcher:
                run(read_job(_written(one)))
        return self.result(job)

    def command(self, job: Job) -> list[str]:
        """Write a job's file, and return the command that runs the job in the folder."""
        with chdir(self.folder):
            return [sys.executable, "-m", "snaketune", job.stage, str(_written(job))]

    def build(self, job: Job, work: Path | str, **instead: Any) -> Outcome:
        """Run a job's `build` in this process and a work folder. Args: instead: of the job's spec and operation."""
        stage = STAGES[job.stage]
        artifacts = {role: [self.result(one) for one in some] for role, some in job.artifacts.items()}
        files = {role: [Path(file) for file in some] for role, some in job.files.items()}
        arguments = {"spec": job.spec} | ({"operation": job.operation} if stage.launcher else {}) | instead
        with chdir(self.folder):
            return import_module(stage.code).build(**arguments, work=started(work), **stage.arguments(artifacts, files))

    def copy_to(self, folder: Path) -> "Project":
        """Copy the results, without work folders, into a new folder."""
        shutil.copytree(self.folder / "results", folder / "results", ignore=shutil.ignore_patterns(".work"))
        return Project(folder=folder, config=self.config)


def _written(job: Job) -> Path:
    """Write a job's file, and return its path."""
    path = job_file_of(job.stage, job.name)
    spec, operation = (of.model_dump(mode="json") for of in (job.spec, job.operation))
    file = JobFile(stage=job.stage, spec=spec, inputs=inputs_by_role(job), out=job.folder, operation=operation)
    write_job_file(path, file, None)
    return path


def _build(job: LoadedJob, work: WorkFolder) -> Outcome:
    """Take the place of a launcher, which starts processes."""
    return import_module(job.stage.code).build(job.spec, work, operation=job.operation, **job.arguments)


def conversations(
    folder: Path,
    files: Sequence[Path],
    texts: Sequence[Path] = (),
    *,
    vocab_size: int = 8192,
    packing: dict[str, Any] | None = None,
    **corpus: Any,
) -> Project:
    """Return a project that trains on the conversations of files, with a tokenizer that is made here.

    Args:
        texts: files that the tokenizer is trained on; default: the same.
        packing, corpus: further keys of the run's `packing` and of its corpus `chat`.
    """
    chat, read = (
        {"kind": "conversations", "sources": [{"files": [str(file) for file in some]}], "held_out": 0}
        for some in (files, texts or files)
    )
    run = UNTRAINED | {"corpus": "chat", "tokenizer": "shared"}
    config = {
        "corpora": {"chat": chat | corpus, "texts": read},
        "sft": {"start": run | {"packing": {"length": ROW_LENGTH, "overflow": "truncate"} | (packing or {})}},
    }
    folder.mkdir(exist_ok=True)
    return with_tokenizer(Project(folder=folder, config=config), ["texts"], vocab_size)


def with_tokenizer(project: Project, corpora: list[str], vocab_size: int) -> Project:
    """Return the project with its tokenizer, made: trained on corpora, and adopted like that of an existing model, so that runs
    can start from models that are made for it."""
    trained = replace(
        project,
        config={
            "corpora": {name: project.config["corpora"][name] for name in corpora},
            "tokenizers": {"trained": {"train": {"corpora": corpora, "vocab_size": vocab_size}}},
        },
    )
    payload = trained.make(trained.job("tokenizer", "trained")).folder
    made = replace(project, config=project.config | {"tokenizers": {"shared": {"adopt": str(payload)}}})
    made.make(made.job("tokenizer", "shared"))
    return made
