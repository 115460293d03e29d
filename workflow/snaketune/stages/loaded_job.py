"""A job as it is run: its job file, with spec, operation and inputs validated once in each process.

The launcher of a training and its workers read the same file. Between them, a newer plan may replace the file, and the race may
decide again: workers compare `digest` with that of the attempt.
"""

import json
import time
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from snaketune.artifacts.digests import digest_json
from snaketune.artifacts.manifest import Artifact
from snaketune.config.operation import Execution
from snaketune.config.tracking import Tracking
from snaketune.errors import SnaketuneError
from snaketune.locations import File, located
from snaketune.stages.cache.code_digest import code_digest
from snaketune.stages.cache.fingerprint import Key
from snaketune.stages.declaration import Stage
from snaketune.stages.host.gpus import visible_gpus
from snaketune.stages.job import result_at
from snaketune.stages.job_files import FORCED, issues_of, read_job_file
from snaketune.stages.races import ending_at, paused_at
from snaketune.stages.table import STAGES
from snaketune.suggestions import unknown

M = TypeVar("M", bound=BaseModel)
SECONDS_UNTIL_REMADE = 60


@dataclass(frozen=True, kw_only=True)
class LoadedJob:
    """One job.

    Attributes:
        path: of its file.
        out: the folder that its result is published in.
        code: digest of the code that shapes the result.
        reruns_on: `versions` if a result made with other versions of libraries isn't reused.
        artifacts, files: inputs by role. Manifests hold what the fingerprint counts.
        remote: by URL, the identity that each remote file had when the job was planned.
        device: kind of device that it computes on, if it does. Kinds share neither results nor unfinished work.
        paused_at: the share of its steps at which its race has paused it, where its spec ends; None if it hasn't.
        forced: whether it computes even if its result exists.
        digest: of what the job file and the race's decision say.
    """

    path: Path
    stage: Stage
    out: Path
    spec: Any
    code: str
    operation: Execution = Execution()
    tracking: Tracking = Tracking()
    reruns_on: str = "code"
    artifacts: dict[str, list[Artifact]] = field(default_factory=dict)
    files: dict[str, list[File]] = field(default_factory=dict)
    remote: dict[str, str] = field(default_factory=dict)
    device: str = ""
    paused_at: float | None = None
    forced: bool = False
    digest: str = ""

    @cached_property
    def plain_spec(self) -> dict[str, Any]:
        """The spec as plain JSON, all defaults included."""
        return self.spec.model_dump(mode="json")

    @property
    def arguments(self) -> dict[str, Any]:
        """The inputs as keyword arguments of the stage's `build`."""
        return self.stage.arguments(self.artifacts, self.files)

    def cache_keys(self) -> tuple[Key, ...]:
        """The cache key of the result, then those of results that count as the same."""
        if self.stage.cache_keys:
            return self.stage.cache_keys(self)
        return (Key(stage=self.stage.name, spec=self.plain_spec, code=self.code, device=self.device),)

    @property
    def is_snapshot(self) -> bool:
        """Whether it ends early, so that other runs may resume from its state."""
        return bool(getattr(getattr(self.spec, "training", None), "until", None))

    def snapshot_specs(self) -> list[dict[str, Any]]:
        """The specs, as plain JSON, of the snapshots that unfinished work may resume from, the latest first."""
        shares = [share for share in self.operation.snapshots if share < (self.spec.training.until or 1.0)]
        return [ending_at(self.plain_spec, share) for share in reversed(shares)]


def read_job(path: Path) -> LoadedJob:
    """Read a job's file, the decision of its race and the manifests of its inputs; SnaketuneError if a spec, an operation or an
    input doesn't match the stage."""
    job = read_job_file(path)
    if job.stage not in STAGES:
        raise SnaketuneError(f"there is no stage {job.stage!r}{unknown(job.stage, STAGES)}")
    stage, out = STAGES[job.stage], Path(job.out)
    operation, share = _validated(Execution, job.operation, "operation"), None
    if operation.race:
        race = result_at(Path(operation.race))
        race.files()
        share = paused_at(race.manifest_path, f"{job.stage}/{out.name}")
    spec = _validated(stage.spec, ending_at(job.spec, share), "spec")
    artifacts, files = _inputs(stage, job.inputs)
    return LoadedJob(
        path=path,
        stage=stage,
        out=out,
        spec=spec,
        code=job.code or code_digest(stage.module),
        operation=operation,
        tracking=job.tracking,
        reruns_on=job.reruns_on,
        artifacts=artifacts,
        files=files,
        remote=job.remote,
        device=("cuda" if operation.gpus and visible_gpus() else "cpu") if stage.gpu else "",
        paused_at=share,
        forced=FORCED in job.stale,
        digest=digest_json([job.model_dump(mode="json", exclude={"stale", "planned"}), share]),
    )


def _validated(model: type[M], content: dict[str, Any], key: str) -> M:
    try:
        return model.model_validate_json(json.dumps(content))
    except ValidationError as error:
        raise SnaketuneError(f"{key} is invalid: {issues_of(error)}") from None


def _inputs(stage: Stage, paths: dict[str, tuple[str, ...]]) -> tuple[dict[str, list[Artifact]], dict[str, list[File]]]:
    """The artifacts and the files by role; SnaketuneError if they aren't those that the stage declares."""
    if unexpected := sorted(paths.keys() - {*stage.inputs, *stage.files}):
        raise SnaketuneError(f"inputs: stage {stage.name} has no input {', '.join(unexpected)}; see `snakemake -n`")
    by_role = {role: [Path(path) for path in paths.get(role, ())] for role in stage.inputs}
    artifacts: dict[str, list[Artifact]] = {}
    for role, source in stage.inputs.items():
        for manifest in by_role[role]:
            wait_for_remade(manifest)
        results = [result_at(manifest) for manifest in by_role[role]]
        if len(results) != 1 and not source.many:
            raise SnaketuneError(f"stage {stage.name} needs exactly one {role}, got {len(results)}; see `snakemake -n`")
        for result in results:
            if (made_by := result.manifest["stage"]) not in source.stages:
                raise SnaketuneError(
                    f"inputs.{role}: {result.manifest_path} is of stage {made_by}; expected {' or '.join(source.stages)}"
                )
        artifacts[role] = [result.as_input(source.entries) for result in results]
    return artifacts, {role: [located(path) for path in paths.get(role, ())] for role in stage.files}


def wait_for_remade(manifest: Path) -> None:
    """Wait for a result that was removed within the last minute.

    Before Snakemake runs a job, it removes the job's outputs, also if another Snakemake (`--nolock`) has just made them.
    """
    logged = False
    while not manifest.exists():
        try:
            since = time.time() - manifest.parent.stat().st_mtime
        except OSError:
            return
        if since > SECONDS_UNTIL_REMADE:
            return
        if not logged:
            print(
                f"waiting for {manifest}, which was removed {since:.0f} s ago; another Snakemake may be making it again",
                flush=True,
            )
            logged = True
        time.sleep(0.2)
