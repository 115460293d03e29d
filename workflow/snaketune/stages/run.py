"""Run one job, as its file describes it."""

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
from snaketune.stages.gpu_needs import gpu_findings, report_findings
from snaketune.stages.host.gpus import claimed_gpus, visible_gpus
from snaketune.stages.job import result_at
from snaketune.stages.job_files import JobFile
from snaketune.stages.links import link_payload
from snaketune.stages.outcome import Outcome
from snaketune.stages.specs import canonical
from snaketune.stages.table import STAGES

M = TypeVar("M", bound=Model)


def reset_future_times(read: Iterable[Artifact], operation: Execution) -> None:
    """Give results that were read, or waited for, the time of now where theirs is yet to come, as after a clock was set back.

    Snakemake refuses what was made of a file of a later time, and removes it. Times of results decide nothing else.
    """
    paths = [
        path
        for artifact in read
        for path in (
            *(artifact.manifest_path, artifact.manifest_path.with_name("run.json")),
            *(artifact.folder, artifact.folder / ".snakemake_timestamp"),
        )
    ]
    paths += [Path(told) for told in (operation.preflight, operation.calibration) if told]
    paths += Path().glob(operation.parts) if operation.parts else ()
    for path in paths:
        # What may not be touched is left to Snakemake, which says what it thinks of it.
        with suppress(OSError):
            if path.stat().st_mtime > time.time():
                os.utime(path)


def run(job: JobFile) -> None:
    """Run one job.

    Raises:
        SnaketuneError: a spec, an operation or an input that doesn't fit the stage.
    """
    if job.stage not in STAGES:
        raise SnaketuneError(f"there is no stage {job.stage!r}{unknown(job.stage, STAGES)}")
    stage, stage_name, out = STAGES[job.stage], job.stage, Path(job.out)
    code = job.code or code_digest(stage.module)
    typed, operation = _fitting(stage.spec, job.spec, "spec"), _fitting(Execution, job.operation, "operation")
    if strange := sorted(job.inputs.keys() - {*stage.one, *stage.many, *stage.files}):
        raise SnaketuneError(f"inputs: stage {stage_name} reads no {', '.join(strange)}")
    inputs = {role: [Path(path) for path in paths] for role, paths in job.inputs.items()}
    artifacts = {role: [result_at(path) for path in inputs.get(role, [])] for role in (*stage.one, *stage.many)}
    for role in stage.one:
        if len(artifacts[role]) != 1:
            raise SnaketuneError(f"stage {stage_name} needs exactly one {role}, got {len(artifacts[role])}")
    for role, results in artifacts.items():
        for result in results:
            if (made_by := result.manifest["stage"]) not in (taken := stage.inputs[role].stages):
                raise SnaketuneError(
                    f"inputs.{role}: {result.manifest_path} is of stage {made_by}; expected {' or '.join(taken)}"
                )
    files = {role: inputs.get(role, []) for role in stage.files}

    def build(work: WorkFolder) -> Outcome:
        # A launched process imports what shapes the result, and checks that itself.
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
            # Read while it worked.
            check_code(stage.module, code, stage_name)
        return outcome

    device = ("cuda" if operation.gpus and visible_gpus() else "cpu") if stage.gpu else ""
    if stage.key_module:
        # Before anything of it is imported to ask what counts.
        check_code(stage.module, code, stage_name)
    # It is asked of the very device that computes.
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
    # Of a stage that reads manifests, what they describe.
    described = map(result_at, files.get("manifests", ()))
    reset_future_times(chain(*artifacts.values(), described), operation)
    if stage.link:
        # Also where there was nothing to compute: what an older result names may have been linked since.
        link_payload(out, stage.link)


def _fitting(model: type[M], content: dict[str, Any], key: str) -> M:
    try:
        return model.model_validate_json(json.dumps(content))
    except ValidationError as error:
        found = "; ".join(f"{'.'.join(map(str, issue['loc']))}: {issue['msg']}" for issue in error.errors())
        raise SnaketuneError(f"{key} doesn't fit: {found}") from None
