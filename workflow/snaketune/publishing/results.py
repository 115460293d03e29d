"""The results that a model card or the report shows, read and checked against the names of their jobs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from snaketune.artifacts.manifest import Artifact, read_artifact, rebuild_command
from snaketune.artifacts.plain_json import parse_json
from snaketune.errors import SnaketuneError
from snaketune.stages.specs import ReportedJob
from snaketune.stages.table import STAGES

# The files of a model by their names in the repository: verified, each with its digest.
Files = dict[str, tuple[Path, str]]


@dataclass(frozen=True, kw_only=True)
class Result:
    """One finished job.

    Attributes:
        job: Its name is the folder below `results/<stage>/`, which has two levels for evaluations and for parts.
        run: Content of run.json; empty where there is none.
    """

    job: ReportedJob
    artifact: Artifact
    run: dict[str, Any] = field(default_factory=dict)

    @property
    def stage(self) -> str:
        return self.job.stage

    @property
    def name(self) -> str:
        return self.job.name

    @property
    def label(self) -> str:
        """The name that evaluations use for a trained model, `sft:demo`; the plain name for other jobs."""
        return f"{self.stage}:{self.name}" if self.stage in ("sft", "dpo", "reward") else self.name

    @property
    def key(self) -> str:
        """The config key that defines it: `dpo.demo`, `eval.demo`; `dpo.sweep` for all variants of a grid."""
        return self.job.config_key or f"{self.stage}.{self.name.partition('/')[0]}"

    @property
    def history(self) -> list[dict[str, Any]]:
        """The log of a training, a dict per logged step."""
        return self.run.get("history") or []

    @property
    def manifest(self) -> dict[str, Any]:
        return self.artifact.manifest

    @property
    def spec(self) -> dict[str, Any]:
        return self.manifest["spec"]

    @property
    def counts(self) -> dict[str, Any]:
        return self.manifest["counts"]


class Results:
    """Results by `stage/name`, in the order of their jobs."""

    def __init__(self, jobs: Sequence[ReportedJob], manifests: Sequence[Path], runs: Sequence[Path] = ()):
        """Read manifests, in the order of the jobs, and run.json files, each beside its manifest.

        Raises:
            SnaketuneError: A file can't be read, or a manifest isn't that of its job.
        """
        if len(jobs) != len(manifests):
            raise SnaketuneError(f"the spec names {len(jobs)} jobs, but there are {len(manifests)} manifests")
        run_of = {path.parent: read_json(path) for path in runs}
        self.by_key: dict[str, Result] = {}
        for job, path in zip(jobs, manifests):
            artifact = read_artifact(path, STAGES[job.stage].payload)
            # The manifest doesn't hold the name of its job; its folder does.
            expected = (job.stage, *job.name.split("/"))
            if path.parent.parts[-len(expected) :] != expected:
                raise SnaketuneError(
                    f"{path} isn't the manifest of {job.stage}/{job.name}: give them in the order of spec.jobs"
                )
            result = Result(job=job, artifact=artifact, run=run_of.get(path.parent, {}))
            self.by_key[f"{job.stage}/{job.name}"] = result

    def of(self, *stages: str) -> list[Result]:
        return [result for result in self.by_key.values() if result.stage in stages]

    @property
    def trainings(self) -> list[Result]:
        return self.of("sft", "dpo", "reward")

    def made_from(self, result: Result, role: str) -> list[Result]:
        """The inputs of `result` in a role, as far as they are among the results."""
        return [self.by_key[key] for key in result.job.made_from.get(role, ()) if key in self.by_key]

    def first(self, result: Result | None, role: str) -> Result | None:
        return next(iter(self.made_from(result, role)), None) if result else None


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file of a result. Raises SnaketuneError, with how to rebuild it, if it can't be read."""
    try:
        return parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SnaketuneError(f"{path} can't be read: {error}; rebuild it with: {rebuild_command(path)}") from None


def read_lines(path: Path) -> list[Any]:
    """Read a file with a JSON value on each line. Raises SnaketuneError if it can't be read."""
    try:
        return [parse_json(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
    except (OSError, ValueError) as error:
        raise SnaketuneError(f"{path} can't be read: {error}") from None


def is_number(value: Any) -> bool:
    """True for a finite number. Bools and strings, which untrusted files may have, aren't numbers."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
