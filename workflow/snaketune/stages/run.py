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
from snaketune.stages.cache.code_digest import check_code, code_digest, import_checked, templates
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.findings import report_findings
from snaketune.stages.host.gpus import claimed_gpus, gpu_findings, visible_gpus
from snaketune.stages.job import result_at
from snaketune.stages.job_files import JobFile
from snaketune.stages.links import link_payload
from snaketune.stages.outcome import Outcome
from snaketune.stages.specs import canonical
from snaketune.stages.table import STAGES

M = TypeVar("M", bound=Model)


def reset_future_times(read: Iterable[Artifact], operation: Execution) -> None:
    """Set the time of inputs to now if it is in the future, as after a clock was set back.

    Snakemake refuses and removes outputs that are older than their inputs. Times of results decide nothing else.
    """
    paths = [
        path
        for artifact in read
        for path in (
            *(artifact.manifest_path, artifact.manifest_path.with_name("run.json")),
            *(artifact.folder, artifact.folder / ".snakemake_timestamp"),
        )
    ]
    paths += [Path(path) for path in (operation.preflight, operation.calibration) if path]
    paths += Path().glob(operation.parts) if operation.parts else ()
    for path in paths:
        # If a file's time can't be set, Snakemake reports the conflict itself.
        with suppress(OSError):
            if path.stat().st_mtime > time.time():
                os.utime(path)


def run(job: JobFile) -> None:
    """Run one job.

    Raises:
        SnaketuneError: a spec, an operation or an input doesn't match the stage.
    """
    if job.stage not in STAGES:
        raise SnaketuneError(f"there is no stage {job.stage!r}{unknown(job.stage, STAGES)}")
    stage, stage_name, out = STAGES[job.stage], job.stage, Path(job.out)
    code = job.code or code_digest(stage.module)
    typed, operation = _validated(stage.spec, job.spec, "spec"), _validated(Execution, job.operation, "operation")
    if unexpected := sorted(job.inputs.keys() - {*stage.one, *stage.many, *stage.files}):
        raise SnaketuneError(f"inputs: stage {stage_name} has no input {', '.join(unexpected)}; see `snakemake -n`")
    inputs = {role: [Path(path) for path in paths] for role, paths in job.inputs.items()}
    artifacts = {role: [result_at(path) for path in inputs.get(role, [])] for role in (*stage.one, *stage.many)}
    for role in stage.one:
        if len(artifacts[role]) != 1:
            raise SnaketuneError(
                f"stage {stage_name} needs exactly one {role}, got {len(artifacts[role])}; see `snakemake -n`"
            )
    for role, results in artifacts.items():
        for result in results:
            if (made_by := result.manifest["stage"]) not in (taken := stage.inputs[role].stages):
                raise SnaketuneError(
                    f"inputs.{role}: {result.manifest_path} is of stage {made_by}; expected {' or '.join(taken)}"
                )
    files = {role: inputs.get(role, []) for role in stage.files}

    def build(work: WorkFolder) -> Outcome:
        # A launched process imports and checks the code itself.
        (check_code if stage.launcher else import_checked)(stage.module, code, stage_name)
        if stage.gpu and not (operation.gpus and visible_gpus()):
            report_findings(gpu_findings(typed, operation))
        with claimed_gpus(operation.gpus) if stage.gpu and not stage.key_module else nullcontext():
            if stage.launcher:
                launch = import_module(stage.launcher).launch
                outcome = launch(
                    stage_name,
                    spec=typed,
                    operation=operation,
                    tracking=job.tracking,
                    work=work,
                    out=out,
                    artifacts=artifacts,
                    files=files,
                )
            else:
                more = {"operation": operation} if stage.takes_operation else {}
                outcome = import_module(stage.module).build(typed, work, **stage.arguments(artifacts, files), **more)
        if templates(stage.module):
            # Templates are read during the build.
            check_code(stage.module, code, stage_name)
        return outcome

    device = ("cuda" if operation.gpus and visible_gpus() else "cpu") if stage.gpu else ""
    if stage.key_module:
        # The key module is imported next; its code has to be that of the plan.
        check_code(stage.module, code, stage_name)
    # The keys depend on the device that computes, so they are computed with its GPUs claimed.
    with claimed_gpus(operation.gpus) if stage.key_module else nullcontext():
        keys = (
            import_module(stage.key_module).keys(stage_name, typed, operation, code, device) if stage.key_module else ()
        )
        build_once(
            stage=stage_name,
            spec=json.loads(canonical(typed)),
            artifacts=artifacts,
            files=files,
            code=code,
            out=out,
            payload=stage.payload,
            build=build,
            libraries=stage.libraries(typed, artifacts),
            reruns_on=job.reruns_on,
            rebuild=stage.measures,
            device=device,
            keys=keys,
        )
    # A stage that reads manifests also waits for the results that they describe.
    described = map(result_at, files.get("manifests", ()))
    reset_future_times(chain(*artifacts.values(), described), operation)
    if stage.link:
        # Also if the result was reused: an older result may name a payload that wasn't linked last.
        link_payload(out, stage.link)


def _validated(model: type[M], content: dict[str, Any], key: str) -> M:
    try:
        return model.model_validate_json(json.dumps(content))
    except ValidationError as error:
        issues = "; ".join(f"{'.'.join(map(str, issue['loc']))}: {issue['msg']}" for issue in error.errors())
        raise SnaketuneError(f"{key} is invalid: {issues}") from None
