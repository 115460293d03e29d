"""Build a result at most once: reuse a finished one or resume unfinished work by fingerprint, otherwise build; then publish.

A finished result with the same fingerprint is published immediately, without importing what the stage itself needs. This gives
early cutoff (an input changed, but not what can be read from it), brings an old result back when a config is put back, and
lets a job that was killed resume its own work.
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

from snaketune.artifacts.manifest import Artifact, describe_files, with_former_roles
from snaketune.errors import SnaketuneError
from snaketune.stages.cache.accepted_code import accepted_codes
from snaketune.stages.cache.attempt import Attempt, cores, resumed_from_versions, stamps_of, thread_count, use_threads
from snaketune.stages.cache.elapsed import timed
from snaketune.stages.cache.external_files import digest_in
from snaketune.stages.cache.fingerprint import Key, fingerprint, read_artifacts, read_files
from snaketune.stages.cache.libraries import installed_version
from snaketune.stages.cache.work_folders import WORK_ROOT, Claim, WorkFolder, publish
from snaketune.stages.host.locks import locked
from snaketune.stages.outcome import Outcome


def build_once(
    *,
    stage: str,
    spec: dict[str, Any],
    artifacts: dict[str, list[Artifact]],
    files: dict[str, list[Path]],
    code: str,
    out: Path,
    payload: str,
    build: Callable[[WorkFolder], Outcome],
    work_root: Path = WORK_ROOT,
    device: str = "",
    libraries: tuple[str, ...] = (),
    reruns_on: str = "code",
    rebuild: bool = False,
    keys: tuple[Key, ...] = (),
) -> None:
    """Publish the stage's result at `out`, building it first if it isn't cached.

    Args:
        spec: the resolved spec as plain JSON.
        artifacts, files: inputs by role.
        code: digest of the code that shapes the result.
        payload: name of the payload folder below `out`.
        build: fills `payload` of the work folder; called only if there is no finished result.
        device: kind of device that the stage computes on, if it does; neither results nor unfinished work are shared between
            kinds.
        libraries: distributions whose version shapes the content.
        reruns_on: `versions` if a result made with other versions of them isn't reused.
        rebuild: don't reuse a finished result, only unfinished work.
        keys: the cache key of the result, then keys of other results that count as the same; empty for a key of the whole
            spec and the content of each input.
    Raises:
        SnaketuneError: a file changed after its digest was computed; nothing is stored, since it would be another file's
            result.
    """
    attempt = Attempt(stage=stage, code=code, stamps=stamps_of(path for some in files.values() for path in some))
    versions = {name: installed_version(name) for name in sorted(libraries)}
    counted_versions = versions if reruns_on == "versions" else None
    own, *equivalent = keys or (Key(stage=stage, spec=spec, code=code, device=device),)
    external = read_files(files, work_root)
    inputs = read_artifacts(artifacts, own.by) | external
    own_fingerprint = fingerprint(stage, own.spec, inputs, code, own.device, counted_versions)
    # The published manifest has the spec and inputs of this job, whichever job the result was built for.
    requested = {"stage": stage, "spec": spec, "inputs": inputs}
    digests = {str(path): digest_in(entry) for role in files for path, entry in zip(files[role], inputs[role])}
    attempt = replace(attempt, digests=digests)
    work, claim = WorkFolder(work_root / stage / own_fingerprint), Claim(out, own_fingerprint, work_root)
    if not rebuild and not work.manifest.is_file():
        # Results that count as the same: made with accepted code, or with these versions before they counted.
        for key in (own, *equivalent):
            read = inputs if key is own else read_artifacts(artifacts, key.by) | external
            codes = (key.code, *accepted_codes(key.stage, key.code, work_root.parent))
            published = requested if key.stage == stage else requested | {"code": code}
            for roles, made_with, used in product((read, with_former_roles(read)), codes, (counted_versions, None)):
                name = fingerprint(key.stage, key.spec, roles, made_with, key.device, used)
                same = WorkFolder(work_root / key.stage / name)
                if same.manifest.is_file() and _publish_existing(
                    same, attempt, counted_versions, claim, payload, published
                ):
                    return
    with locked(work.folder / "lock", f"{stage} {own_fingerprint}") as lease:
        work = replace(work, lease=lease)
        # Files may have changed while their digests were computed, or while another process held the folder.
        attempt.check_files()
        result = None if rebuild else work.result()
        if result is None:
            started = time.time()
            work.start()
            with timed(work) as elapsed:
                older = resumed_from_versions(work.state, versions)
                attempt = replace(
                    attempt, threads=thread_count(work.state) if device else None, versions=versions | older
                )
                attempt.save(work.state)
                outcome = _build_checked(build, work, attempt)
                described = describe_files(work.payload)
            manifest = {
                **outcome.about,
                # On a GPU, the CPU threads don't affect the result.
                **({"threads": attempt.threads} if device == "cpu" else {}),
                "stage": stage,
                "fingerprint": own_fingerprint,
                "spec": spec,
                "code": code,
                "inputs": inputs,
                "counts": outcome.counts,
                "payload": {name: entry for name, entry in described.items() if name not in outcome.records},
                "records": {name: entry for name, entry in described.items() if name in outcome.records},
                "versions": versions,
                **({"resumed_from_versions": older} if older else {}),
            }
            work.finish(manifest, _run_facts(started, elapsed()) | outcome.run)
            result = Artifact(work.manifest, manifest, work.finished)
            print(f"{stage}: made {out} in {time.time() - started:.1f} s", flush=True)
        else:
            _log_reuse(stage, out, work)
        work.check_held()
        publish(result, work, claim, payload, requested)


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


def _publish_existing(
    work: WorkFolder,
    attempt: Attempt,
    versions: dict[str, str | None] | None,
    claim: Claim,
    payload: str,
    requested: dict[str, Any],
) -> bool:
    """Publish the result in a work folder if there is one, made with `versions` from its first attempt (None: with any)."""
    with locked(work.folder / "lock", f"{attempt.stage} {work.folder.name}"):
        attempt.check_files()
        result = work.result()
        if result is None:
            return False
        if versions is not None and (
            versions != result.manifest["versions"] or "resumed_from_versions" in result.manifest
        ):
            return False
        _log_reuse(attempt.stage, claim.out, work)
        publish(result, work, claim, payload, requested)
        return True


def _log_reuse(stage: str, out: Path, work: WorkFolder) -> None:
    print(f"{stage}: nothing to compute; {out} is the result of {work.made_at()} ({work.folder.name})", flush=True)


def _run_facts(started: float, attempts: list[float]) -> dict[str, Any]:
    """Return the facts for run.json. Args: started: time of the last attempt; attempts: seconds of each."""
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(started)),
        "seconds": round(sum(attempts), 3),
        "attempts": attempts,
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "cores": cores(),
        "peak_memory_mb": _peak_memory_mb(),
    }


def _peak_memory_mb() -> int:
    """Return the peak memory of this process or of its largest child process, in MB."""
    largest = max(getrusage(who).ru_maxrss for who in (RUSAGE_SELF, RUSAGE_CHILDREN))
    # macOS counts bytes, Linux kilobytes.
    return largest // (2**20 if sys.platform == "darwin" else 2**10)
