"""Run one job: look its result up by fingerprint, build it or resume unfinished work if there is none, and publish it.

A finished result with the same fingerprint is published at once, without importing what the stage itself needs: an input may
change in what isn't read from it (early cutoff), and an old result comes back when a config is put back.
"""

import os
import platform
import socket
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from importlib import import_module
from itertools import chain, product
from pathlib import Path
from resource import RUSAGE_CHILDREN, RUSAGE_SELF, getrusage
from typing import Any

from snaketune.artifacts.manifest import Artifact, describe_files
from snaketune.config.operation import Execution
from snaketune.errors import SnaketuneError
from snaketune.stages.cache.attempt import Attempt, resumed_from_versions, stamps_of, thread_count, timed
from snaketune.stages.cache.code_digest import accepted_codes, check_code, import_checked, revision
from snaketune.stages.cache.fingerprint import fingerprint, fingerprint_entries, read_artifacts, read_files
from snaketune.stages.cache.libraries import installed_version
from snaketune.stages.cache.work_folders import WORK_ROOT, Claim, WorkFolder, publish
from snaketune.stages.findings import report_findings
from snaketune.stages.host.gpus import claimed_gpus, gpu_findings, visible_gpus
from snaketune.stages.host.locks import locked
from snaketune.stages.host.threads import VARIABLE, cores
from snaketune.stages.job import result_at
from snaketune.stages.links import link_payload
from snaketune.stages.loaded_job import LoadedJob
from snaketune.stages.outcome import Outcome
from snaketune.stages.part_progress import part_progress
from snaketune.stages.races import FILE, PAYLOAD


def run(job: LoadedJob) -> None:
    """Run one job; SnaketuneError if its code changed since it was planned."""
    stage, operation = job.stage, job.operation
    if job.paused_at:
        decisions = Path(operation.race).with_name(PAYLOAD) / FILE
        print(f"paused after {job.paused_at:.0%} of the steps: other variants are better; see {decisions}", flush=True)
    if stage.cache_keys:
        # They are computed next, by the code of the plan.
        check_code(stage.module, job.code, stage.name)
    # The keys depend on the device that computes, so they are computed with its GPUs claimed.
    with claimed_gpus(operation.gpus) if stage.cache_keys else nullcontext():
        build_once(job, partial(_build, job))
    # A stage that reads manifests also waits for the results that they describe.
    described = [result_at(path) for path in job.files.get("manifests", ()) if isinstance(path, Path)]
    reset_future_times(chain(*job.artifacts.values(), described), operation)
    if line := part_progress(stage.name, job.out):
        print(line, flush=True)
    if stage.link:
        # Also if the result was reused: an older result may name a payload that wasn't linked last.
        link_payload(job.out, stage.link)


def build_once(job: LoadedJob, build: Callable[[WorkFolder], Outcome], work_root: Path = WORK_ROOT) -> None:
    """Publish the job's result at `job.out`, building it first if it isn't cached.

    If a file changes after its digest was computed, nothing is stored: SnaketuneError. Args: build: fills `payload` of the work
    folder; called only if there is no finished result.
    """
    stage, out = job.stage, job.out
    stamps = stamps_of(path for paths in job.files.values() for path in paths)
    versions = {name: installed for name in sorted(stage.libraries) if (installed := installed_version(name))}
    counted_versions = versions if job.reruns_on == "versions" else None
    key, *equivalent = job.cache_keys()
    read_now = read_files(job.files, work_root, shared=stage.array)
    digests = {str(path): digest for read in read_now.values() for path, digest in read}
    if changed := [url for url, planned in job.remote.items() if planned != digests.get(url)]:
        raise SnaketuneError(f"{', '.join(changed)} changed since this run was planned; run again")
    external = {role: [entry for _, entry in fingerprint_entries(role, read)] for role, read in read_now.items()}
    inputs = read_artifacts(job.artifacts, key.by) | external
    attempt = Attempt(stage=stage.name, code=job.code, stamps=stamps, job=job.digest, inputs=inputs, digests=digests)
    name = fingerprint(key, inputs, counted_versions)
    work, claim = WorkFolder(work_root / stage.name / name), Claim(out, name, work_root)
    # The published manifest has the spec and inputs of this job, whichever job the result was built for.
    requested = {"stage": stage.name, "spec": job.plain_spec, "inputs": inputs}

    def publish_cached(cached: WorkFolder, result: Artifact, described: dict[str, Any]) -> None:
        origin = f"{out} is the result of {cached.made_at()} ({cached.folder.name})"
        origin += f"; its log is {cached.log}" if cached.log.is_file() else ""
        print(f"{stage.name}: nothing to compute; {origin}", flush=True)
        publish(result, cached, claim, stage.payload, described)

    reuses = not (stage.measures or job.forced)
    if reuses and not work.manifest.is_file():
        # Results that count as the same: made with accepted code, or with these versions before they counted.
        for other in (key, *equivalent):
            read = inputs if other is key else read_artifacts(job.artifacts, other.by) | external
            codes = (other.code, *accepted_codes(other.stage, other.code, work_root.parent))
            for made_with, used in product(codes, (counted_versions, None)):
                same = WorkFolder(work_root / other.stage / fingerprint(replace(other, code=made_with), read, used))
                if not same.manifest.is_file():
                    continue
                with locked(same.folder / "lock", f"{other.stage} {same.folder.name}"):
                    attempt.check_files()
                    result = same.result()
                    if result and _made_with(counted_versions, result):
                        described = requested if other.stage == stage.name else requested | {"code": job.code}
                        publish_cached(same, result, described)
                        return
    with locked(work.folder / "lock", f"{stage.name} {name}") as lease:
        work = replace(work, lease=lease)
        # Files may have changed while their digests were computed, or while another process held the folder.
        attempt.check_files()
        if reuses and (result := work.result()):
            work.check_held()
            publish_cached(work, result, requested)
            return
        started = time.time()
        if job.forced and work.manifest.is_file():
            # A snapshot has kept its last checkpoint, from which nothing would be computed.
            work.manifest.unlink()
            work.discard()
        work.start()
        snapshots = (fingerprint(replace(key, spec=spec), inputs, counted_versions) for spec in job.snapshot_specs())
        work.resume_from(WorkFolder(work_root / stage.name / snapshot) for snapshot in snapshots)
        with timed(work) as elapsed:
            older = resumed_from_versions(work.state, versions)
            threads = thread_count(work.state) if job.device else None
            if threads is not None:
                # For torch, here or in a child process.
                os.environ[VARIABLE] = str(threads)
            attempt = replace(attempt, threads=threads, versions=versions | older)
            attempt.save(work.state)
            outcome = _build_checked(build, work, attempt)
            described = describe_files(work.payload)
        manifest = {
            **outcome.about,
            # On a GPU, the CPU threads don't affect the result.
            **({"threads": threads} if job.device == "cpu" else {}),
            **requested,
            "fingerprint": name,
            "code": job.code,
            "counts": outcome.counts,
            "payload": {name: entry for name, entry in described.items() if name not in outcome.records},
            "records": {name: entry for name, entry in described.items() if name in outcome.records},
            "versions": versions,
            **({"resumed_from_versions": older} if older else {}),
        }
        work.finish(manifest, _run_facts(started, elapsed()) | outcome.run, job.is_snapshot)
        work.keep_log(Path(f"{work_root.parent}/logs/{os.path.relpath(out, work_root.parent)}.log"), started)
        print(f"{stage.name}: made {out} in {time.time() - started:.1f} s", flush=True)
        work.check_held()
        publish(Artifact(work.manifest, manifest, work.finished), work, claim, stage.payload, requested)


def _made_with(versions: dict[str, str] | None, result: Artifact) -> bool:
    """Whether a result was made with these versions of libraries from its first attempt on; None: any versions."""
    manifest = result.manifest
    return versions is None or (versions == manifest["versions"] and "resumed_from_versions" not in manifest)


def _build_checked(build: Callable[[WorkFolder], Outcome], work: WorkFolder, attempt: Attempt) -> Outcome:
    """Run `build`, and raise SnaketuneError if the files that it read aren't those of the fingerprint."""
    try:
        return build(work)
    finally:
        # Also after a failure, which a changed file may have caused.
        try:
            attempt.check_files()
        except SnaketuneError:
            # The unfinished work is of another file's rows; the next attempt must not resume it.
            work.discard()
            raise


def _build(job: LoadedJob, work: WorkFolder) -> Outcome:
    """Run the stage's `build`, here or in processes that its launcher starts, with the code that was planned."""
    stage, operation = job.stage, job.operation
    # A launched process imports and checks the code itself.
    (check_code if stage.launcher else import_checked)(stage.module, job.code, stage.name)
    if stage.gpu and not (operation.gpus and visible_gpus()):
        report_findings(gpu_findings(job.spec, operation))
    with claimed_gpus(operation.gpus) if stage.gpu and not stage.cache_keys else nullcontext():
        if stage.launcher:
            return import_module(stage.launcher).launch(job, work)
        more = {"operation": operation} if stage.takes_operation else {}
        outcome = import_module(stage.code).build(job.spec, work, **job.arguments, **more)
    # Templates are read during the build, and some modules.
    check_code(stage.module, job.code, stage.name)
    return outcome


def _run_facts(started: float, attempts: list[float]) -> dict[str, Any]:
    """The facts for run.json. Args: started: time of the last attempt; attempts: seconds of each."""
    # Of this process or its largest child; macOS counts bytes, Linux kilobytes.
    peak_memory = max(getrusage(who).ru_maxrss for who in (RUSAGE_SELF, RUSAGE_CHILDREN))
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(started)),
        "seconds": round(sum(attempts), 3),
        "attempts": attempts,
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "revision": revision(),
        "cores": cores(),
        "peak_memory_mb": peak_memory // (2**20 if sys.platform == "darwin" else 2**10),
    }


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
