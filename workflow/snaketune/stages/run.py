"""Run one job: build its result, or reuse a finished one, and publish it."""

import os
import time
from collections.abc import Iterable
from contextlib import nullcontext, suppress
from importlib import import_module
from itertools import chain
from pathlib import Path

from snaketune.artifacts.manifest import Artifact
from snaketune.config.operation import Execution
from snaketune.stages.cache.build_once import build_once
from snaketune.stages.cache.code_digest import check_code, import_checked
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.findings import report_findings
from snaketune.stages.host.gpus import claimed_gpus, gpu_findings, visible_gpus
from snaketune.stages.job import result_at
from snaketune.stages.links import link_payload
from snaketune.stages.loaded_job import LoadedJob
from snaketune.stages.outcome import Outcome
from snaketune.stages.races import FILE, PAYLOAD


def run(job: LoadedJob) -> None:
    """Run one job; SnaketuneError if its code changed since it was planned."""
    stage, operation = job.stage, job.operation
    if job.paused_at:
        decisions = Path(operation.race).with_name(PAYLOAD) / FILE
        print(f"paused after {job.paused_at:.0%} of the steps: other variants are better; see {decisions}", flush=True)

    def build(work: WorkFolder) -> Outcome:
        # A launched process imports and checks the code itself.
        (check_code if stage.launcher else import_checked)(stage.module, job.code, stage.name)
        if stage.gpu and not (operation.gpus and visible_gpus()):
            report_findings(gpu_findings(job.spec, operation))
        with claimed_gpus(operation.gpus) if stage.gpu and not stage.cache_keys else nullcontext():
            if stage.launcher:
                outcome = import_module(stage.launcher).launch(job, work)
            else:
                more = {"operation": operation} if stage.takes_operation else {}
                outcome = import_module(stage.module).build(job.spec, work, **job.arguments, **more)
        if not stage.launcher:
            # Templates are read during the build, and some modules.
            check_code(stage.module, job.code, stage.name)
        return outcome

    if stage.cache_keys:
        # They are computed next, by the code of the plan.
        check_code(stage.module, job.code, stage.name)
    # The keys depend on the device that computes, so they are computed with its GPUs claimed.
    with claimed_gpus(operation.gpus) if stage.cache_keys else nullcontext():
        build_once(job, build)
    # A stage that reads manifests also waits for the results that they describe.
    described = map(result_at, job.files.get("manifests", ()))
    reset_future_times(chain(*job.artifacts.values(), described), operation)
    if stage.link:
        # Also if the result was reused: an older result may name a payload that wasn't linked last.
        link_payload(job.out, stage.link)


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
