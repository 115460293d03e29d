"""A job of the graph: one run of one stage, with the path of its result and the inputs that it reads."""

import hashlib
import json
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from snaketune.artifacts.manifest import Artifact, read_artifact
from snaketune.config.base import Model
from snaketune.config.operation import Execution
from snaketune.errors import SnaketuneError
from snaketune.stages.declaration import Stage
from snaketune.stages.specs import canonical

RESULTS = Path("results")


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run of one stage."""

    stage: str
    name: str
    spec: Any  # the stage's own model
    artifacts: dict[str, tuple["Job", ...]] = field(default_factory=dict)  # by role, the jobs whose results it reads
    files: dict[str, tuple[str, ...]] = field(default_factory=dict)  # by role, the external files that it reads
    operation: Execution = Execution()
    after: tuple["Job", ...] = ()  # jobs whose results affect how it runs, not what it computes

    @cached_property
    def race(self) -> "Job | None":
        """The race that may pause this training."""
        return next((job for job in self.after if job.stage == "race"), None)

    @cached_property
    def plain_spec(self) -> dict[str, Any]:
        """The spec as plain JSON, all defaults included."""
        return self.spec.model_dump(mode="json")

    @cached_property
    def folder(self) -> str:
        """The folder that its result is published in: `results/sft/demo`, or `results/report` for a job without a name."""
        return str(RESULTS / self.stage / self.name)

    @cached_property
    def key(self) -> str:
        """The job's name in messages and specs: `sft/demo`."""
        return self.folder.removeprefix(f"{RESULTS}/")

    @cached_property
    def manifest(self) -> str:
        return f"{self.folder}/manifest.json"

    @cached_property
    def payload(self) -> str:
        return f"{self.folder}/{_stage(self.stage).payload}"

    @cached_property
    def run(self) -> str:
        return f"{self.folder}/run.json"


def _stage(name: str) -> Stage:
    # Modules that declare stages import this one to plan jobs of their own.
    from snaketune.stages.table import STAGES

    return STAGES[name]


def short_digest(spec: Model, *made_of: str) -> str:
    """Eight hex digits over a spec and names, such that `a` with `b-c` and `a-b` with `c` differ."""
    return hashlib.sha256(json.dumps([canonical(spec), *made_of]).encode()).hexdigest()[:8]


def result_at(manifest: Path) -> Artifact:
    """Read a published result, with the payload of the stage in its manifest; SnaketuneError if there is none, or it can't be
    read."""
    if not manifest.is_file():
        raise SnaketuneError(f"{manifest} doesn't exist; make it with: snakemake {manifest}")
    result = read_artifact(manifest, "")
    try:
        return replace(result, folder=manifest.parent / _stage(result.manifest["stage"]).payload)
    except (KeyError, TypeError) as error:
        raise SnaketuneError(f"{manifest} is no snaketune manifest ({error!r}); remove it and run again") from None
