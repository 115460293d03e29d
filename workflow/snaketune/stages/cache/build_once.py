"""Build a result at most once: reuse a finished one or resume unfinished work by fingerprint, otherwise build; then publish.

A finished result with the same fingerprint is published at once, without importing what the stage itself needs: an input may
change in what isn't read from it (early cutoff), and an old result comes back when a config is put back.
"""

import platform
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from resource import RUSAGE_CHILDREN, RUSAGE_SELF, getrusage
from typing import Any

from snaketune.artifacts.manifest import Artifact, describe_files
from snaketune.errors import SnaketuneError
from snaketune.stages.cache.attempt import (
    Attempt,
    resumed_from_versions,
    stamps_of,
    thread_count,
    timed,
    use_threads,
)
from snaketune.stages.cache.code_digest import accepted_codes
from snaketune.stages.cache.fingerprint import fingerprint, fingerprint_entries, read_artifacts, read_files
from snaketune.stages.cache.libraries import installed_version
from snaketune.stages.cache.work_folders import WORK_ROOT, Claim, WorkFolder, publish
from snaketune.stages.host.locks import locked
from snaketune.stages.host.threads import cores
from snaketune.stages.loaded_job import LoadedJob
from snaketune.stages.outcome import Outcome


def build_once(job: LoadedJob, build: Callable[[WorkFolder], Outcome], work_root: Path = WORK_ROOT) -> None:
    """Publish the job's result at `job.out`, building it first if it isn't cached.

    If a file changes after its digest was computed, nothing is stored: SnaketuneError. Args: build: fills `payload` of the work
    folder; called only if there is no finished result.
    """
    stage, out = job.stage, job.out
    stamps = stamps_of(path for paths in job.files.values() for path in paths)
    versions = {name: installed_version(name) for name in sorted(stage.libraries(job.spec, job.artifacts))}
    counted_versions = versions if job.reruns_on == "versions" else None
    key, *equivalent = job.cache_keys()
    read_now = read_files(job.files, work_root)
    external = {role: [entry for _, entry in fingerprint_entries(role, read)] for role, read in read_now.items()}
    inputs = read_artifacts(job.artifacts, key.by) | external
    digests = {str(path): digest for read in read_now.values() for path, digest in read}
    attempt = Attempt(
        stage=stage.name,
        code=job.code,
        stamps=stamps,
        job=job.digest,
        inputs=inputs,
        digests=digests,
    )
    name = fingerprint(key, inputs, counted_versions)
    work, claim = WorkFolder(work_root / stage.name / name), Claim(out, name, work_root)
    # The published manifest has the spec and inputs of this job, whichever job the result was built for.
    requested = {"stage": stage.name, "spec": job.plain_spec, "inputs": inputs}

    def publish_cached(cached: WorkFolder, result: Artifact, described: dict[str, Any]) -> None:
        made = f"{out} is the result of {cached.made_at()} ({cached.folder.name})"
        print(f"{stage.name}: nothing to compute; {made}", flush=True)
        publish(result, cached, claim, stage.payload, described)

    if not stage.measures and not work.manifest.is_file():
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
        if not stage.measures and (result := work.result()):
            work.check_held()
            publish_cached(work, result, requested)
            return
        started = time.time()
        work.start()
        snapshots = (fingerprint(replace(key, spec=spec), inputs, counted_versions) for spec in job.snapshot_specs())
        work.resume_from(WorkFolder(work_root / stage.name / snapshot) for snapshot in snapshots)
        with timed(work) as elapsed:
            older = resumed_from_versions(work.state, versions)
            threads = thread_count(work.state) if job.device else None
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
        print(f"{stage.name}: made {out} in {time.time() - started:.1f} s", flush=True)
        work.check_held()
        publish(Artifact(work.manifest, manifest, work.finished), work, claim, stage.payload, requested)


def _made_with(versions: dict[str, str | None] | None, result: Artifact) -> bool:
    """Whether a result was made with these versions of libraries from its first attempt on; None: any versions."""
    manifest = result.manifest
    return versions is None or (versions == manifest["versions"] and "resumed_from_versions" not in manifest)


def _build_checked(build: Callable[[WorkFolder], Outcome], work: WorkFolder, attempt: Attempt) -> Outcome:
    """Run `build`, and raise SnaketuneError if the files that it read aren't those of the fingerprint."""
    try:
        with use_threads(attempt.threads):
            return build(work)
    finally:
        # Also after a failure, which a changed file may have caused.
        try:
            attempt.check_files()
        except SnaketuneError:
            # The unfinished work is of another file's rows; the next attempt must not resume it.
            work.discard()
            raise


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
        "cores": cores(),
        "peak_memory_mb": peak_memory // (2**20 if sys.platform == "darwin" else 2**10),
    }
