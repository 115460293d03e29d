"""Run one job, as its job file describes it."""

import json
import os
import time
from collections.abc import Iterable
from contextlib import nullcontext, suppress
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from snaketune.artifacts.manifest import Artifact
from snaketune.config.base import Model
from snaketune.config.operation import Execution
from snaketune.config.suggestions import unknown
from snaketune.errors import SnaketuneError
from snaketune.stages.cache.build_once import build_once
from snaketune.stages.cache.code_digest import check_code, code_digest, import_checked
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.declaration import Stage
from snaketune.stages.findings import report_findings
from snaketune.stages.host.gpus import claimed_gpus, gpu_findings, visible_gpus
from snaketune.stages.job import result_at
from snaketune.stages.job_files import JobFile
from snaketune.stages.links import link_payload
from snaketune.stages.outcome import Outcome
from snaketune.stages.races import FILE, ending_at, paused_at
from snaketune.stages.specs import canonical
from snaketune.stages.table import STAGES

M = TypeVar("M", bound=Model)
SECONDS_UNTIL_REMADE = 60


def run(job: JobFile) -> None:
    """Run one job; SnaketuneError if a spec, an operation or an input doesn't match the stage."""
    if job.stage not in STAGES:
        raise SnaketuneError(f"there is no stage {job.stage!r}{unknown(job.stage, STAGES)}")
    stage, out = STAGES[job.stage], Path(job.out)
    code = job.code or code_digest(stage.module)
    operation = _validated(Execution, job.operation, "operation")
    share = _paused_at(operation, f"{job.stage}/{out.name}") if operation.race else None
    spec = _validated(stage.spec, ending_at(job.spec, share), "spec")
    artifacts, files = _inputs(stage, job.inputs)

    def build(work: WorkFolder) -> Outcome:
        # A launched process imports and checks the code itself.
        (check_code if stage.launcher else import_checked)(stage.module, code, stage.name)
        if stage.gpu and not (operation.gpus and visible_gpus()):
            report_findings(gpu_findings(spec, operation))
        with claimed_gpus(operation.gpus) if stage.gpu and not stage.key_module else nullcontext():
            if stage.launcher:
                settings = {"spec": spec, "operation": operation, "tracking": job.tracking, "work": work, "out": out}
                launch = import_module(stage.launcher).launch
                outcome = launch(stage.name, **settings, artifacts=artifacts, files=files)
            else:
                more = {"operation": operation} if stage.takes_operation else {}
                outcome = import_module(stage.module).build(spec, work, **stage.arguments(artifacts, files), **more)
        if not stage.launcher:
            # Templates are read during the build, and some modules.
            check_code(stage.module, code, stage.name)
        return outcome

    device = ("cuda" if operation.gpus and visible_gpus() else "cpu") if stage.gpu else ""
    if stage.key_module:
        # The key module is imported next; its code has to be that of the plan.
        check_code(stage.module, code, stage.name)
    # The keys depend on the device that computes, so they are computed with its GPUs claimed.
    with claimed_gpus(operation.gpus) if stage.key_module else nullcontext():
        arguments = (stage.name, spec, operation, code, device)
        build_once(
            stage=stage.name,
            spec=json.loads(canonical(spec)),
            artifacts=artifacts,
            files=files,
            code=code,
            out=out,
            payload=stage.payload,
            build=build,
            libraries=stage.libraries(spec, artifacts),
            reruns_on=job.reruns_on,
            rebuild=stage.measures,
            device=device,
            keys=import_module(stage.key_module).keys(*arguments) if stage.key_module else (),
            before=_snapshot_specs(spec, operation),
            keep_state=bool(getattr(getattr(spec, "training", None), "until", None)),
        )
    # A stage that reads manifests also waits for the results that they describe.
    described = map(result_at, files.get("manifests", ()))
    reset_future_times(chain(*artifacts.values(), described), operation)
    if stage.link:
        # Also if the result was reused: an older result may name a payload that wasn't linked last.
        link_payload(out, stage.link)


def _snapshot_specs(spec: Model, operation: Execution) -> tuple[dict[str, Any], ...]:
    """Return the specs of the snapshots that a training resumes from, the latest first."""
    return tuple(
        json.loads(canonical(spec.model_copy(update={"training": spec.training.model_copy(update={"until": share})})))
        for share in reversed(operation.snapshots)
        if share < (spec.training.until or 1.0)
    )


def _paused_at(operation: Execution, run: str) -> float | None:
    """Return the share of its steps at which its race has paused a run, and print it; None if it hasn't."""
    race = result_at(Path(operation.race))
    race.files()
    if share := paused_at(race.manifest_path, run):
        print(f"paused after {share:.0%} of the steps: other variants are better; see {race.folder / FILE}", flush=True)
    return share


def _validated(model: type[M], content: dict[str, Any], key: str) -> M:
    try:
        return model.model_validate_json(json.dumps(content))
    except ValidationError as error:
        issues = "; ".join(f"{'.'.join(map(str, issue['loc']))}: {issue['msg']}" for issue in error.errors())
        raise SnaketuneError(f"{key} is invalid: {issues}") from None


def _inputs(stage: Stage, given: dict[str, tuple[str, ...]]) -> tuple[dict[str, list[Artifact]], dict[str, list[Path]]]:
    """Return the artifacts and the files by role; SnaketuneError if they aren't those that the stage declares."""
    if unexpected := sorted(given.keys() - {*stage.inputs, *stage.files}):
        raise SnaketuneError(f"inputs: stage {stage.name} has no input {', '.join(unexpected)}; see `snakemake -n`")
    for path in chain.from_iterable(given.get(role, ()) for role in stage.inputs):
        wait_for_remade(Path(path))
    artifacts = {role: [result_at(Path(path)) for path in given.get(role, ())] for role in stage.inputs}
    for role in stage.one:
        if (count := len(artifacts[role])) != 1:
            raise SnaketuneError(f"stage {stage.name} needs exactly one {role}, got {count}; see `snakemake -n`")
    for role, results in artifacts.items():
        taken = stage.inputs[role]
        for result in results:
            if (made_by := result.manifest["stage"]) not in taken.stages:
                raise SnaketuneError(
                    f"inputs.{role}: {result.manifest_path} is of stage {made_by}; expected {' or '.join(taken.stages)}"
                )
        artifacts[role] = [result.as_input(taken.entries) for result in results]
    return artifacts, {role: [Path(path) for path in given.get(role, ())] for role in stage.files}


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


def reset_future_times(read: Iterable[Artifact], operation: Execution) -> None:
    """Set future times of inputs to now, as after a clock was set back: Snakemake removes outputs older than their inputs."""
    paths = [Path(path) for path in (operation.preflight, operation.calibration) if path]
    paths += Path().glob(operation.parts) if operation.parts else ()
    for artifact in read:
        paths += [artifact.manifest_path, artifact.manifest_path.with_name("run.json")]
        paths += [artifact.folder, artifact.folder / ".snakemake_timestamp"]
    for path in paths:
        # If a file's time can't be set, Snakemake reports the conflict itself.
        with suppress(OSError):
            if path.stat().st_mtime > time.time():
                os.utime(path)
