"""Run a stage at most once: look for its result or its half-done work by fingerprint, else build, then publish.

A complete result under the fingerprint is published at once, without importing what the stage itself would need. That gives
early cutoff (an input changed, but not what can be read from it), brings an old result back when a config is put back, and
lets a killed job find its own half-done work.
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
    """Publish the stage's result at `out`, building it first if nobody has.

    Args:
        spec: the resolved spec as plain JSON.
        artifacts, files: inputs by role.
        code: digest of the code that shapes the result.
        payload: name of the payload folder below `out`.
        build: fills `payload` of the work folder; called only if there is no complete result.
        device: kind of device that a stage computes on, where it computes; a training begun on one kind isn't resumed, and
            a result made on one isn't taken, on another.
        libraries: distributions whose version shapes the content.
        reruns_on: `versions` if a result made with other versions of them isn't taken.
        rebuild: no finished result is taken, only half-done work.
        keys: what the result is known by, and then what others are known by that count as the same; none for the spec as it
            is, and the content of each input.
    Raises:
        SnaketuneError: a file changed after its digest was computed; nothing is kept, since it would be another file's result.
    """
    attempt = Attempt(stage=stage, code=code, stamps=stamps_of(path for some in files.values() for path in some))
    versions = {name: installed_version(name) for name in sorted(libraries)}
    counted = versions if reruns_on == "versions" else None
    own, *alike = keys or (Key(stage=stage, spec=spec, code=code, device=device),)
    outside = read_files(files, work_root)
    inputs = read_artifacts(artifacts, own.by) | outside
    found = fingerprint(stage, own.spec, inputs, code, own.device, counted)
    # What is published says what was requested for here, whatever it was made for.
    requested = {"stage": stage, "spec": spec, "inputs": inputs}
    digests = {str(path): digest_in(entry) for role in files for path, entry in zip(files[role], inputs[role])}
    attempt = replace(attempt, digests=digests)
    work, claim = WorkFolder(work_root / stage / found), Claim(out, found, work_root)
    if not rebuild and not work.manifest.is_file():
        # What counts as the same: made with code that was accepted since, or with these versions before they counted.
        for key in (own, *alike):
            read = inputs if key is own else read_artifacts(artifacts, key.by) | outside
            codes = (key.code, *accepted_codes(key.stage, key.code, work_root.parent))
            told = requested if key.stage == stage else requested | {"code": code}
            for made_with, known in product(codes, (counted, None)):
                name = fingerprint(key.stage, key.spec, read, made_with, key.device, known)
                same = WorkFolder(work_root / key.stage / name)
                if same.manifest.is_file() and _published(same, attempt, counted, claim, payload, told):
                    return
    with locked(work.folder / "lock", f"{stage} {found}") as lease:
        work = replace(work, lease=lease)
        # Files may have changed while their digests were computed, or while somebody else held the folder.
        attempt.check_files()
        result = None if rebuild else work.result()
        if result is None:
            started = time.time()
            work.start()
            with timed(work) as spent:
                older = resumed_from_versions(work.state, versions)
                attempt = replace(
                    attempt, threads=thread_count(work.state) if device else None, versions=versions | older
                )
                attempt.save(work.state)
                outcome = _built(build, work, attempt)
                described = describe_files(work.payload)
            manifest = {
                **outcome.about,
                # On a GPU, what sums isn't these.
                **({"threads": attempt.threads} if device == "cpu" else {}),
                "stage": stage,
                "fingerprint": found,
                "spec": spec,
                "code": code,
                "inputs": inputs,
                "counts": outcome.counts,
                "payload": {name: entry for name, entry in described.items() if name not in outcome.records},
                "records": {name: entry for name, entry in described.items() if name in outcome.records},
                "versions": versions,
                **({"resumed_from_versions": older} if older else {}),
            }
            work.finish(manifest, _run_facts(started, spent()) | outcome.run)
            result = Artifact(work.manifest, manifest, work.finished)
            print(f"{stage}: made {out} in {time.time() - started:.1f} s", flush=True)
        else:
            _say_known(stage, out, work)
        work.check_held()
        publish(result, work, claim, payload, requested)


def _built(build: Callable[[WorkFolder], Outcome], work: WorkFolder, attempt: Attempt) -> Outcome:
    """What `build` says, if the files that it read are those of the fingerprint."""
    try:
        with use_threads(attempt.threads):
            return build(work)
    finally:
        # Also where it failed, perhaps for this very reason.
        try:
            attempt.check_files()
        except SnaketuneError:
            # Half-done work on another file's rows; a resumed attempt would take it for its own.
            work.discard()
            raise


def _published(
    work: WorkFolder,
    attempt: Attempt,
    versions: dict[str, str | None] | None,
    claim: Claim,
    payload: str,
    requested: dict[str, Any],
) -> bool:
    """Publish the result in a work folder, if there is one, made with `versions` from its beginning (None: with any)."""
    with locked(work.folder / "lock", f"{attempt.stage} {work.folder.name}"):
        attempt.check_files()
        result = work.result()
        if result is None:
            return False
        if versions is not None and (
            versions != result.manifest["versions"] or "resumed_from_versions" in result.manifest
        ):
            return False
        _say_known(attempt.stage, claim.out, work)
        publish(result, work, claim, payload, requested)
        return True


def _say_known(stage: str, out: Path, work: WorkFolder) -> None:
    print(f"{stage}: nothing to compute; {out} is the result of {work.made_at()} ({work.folder.name})", flush=True)


def _run_facts(started: float, attempts: list[float]) -> dict[str, Any]:
    """Args: started: the last attempt; attempts: seconds of each."""
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
    """Of this process, or of the largest that it has waited for."""
    largest = max(getrusage(who).ru_maxrss for who in (RUSAGE_SELF, RUSAGE_CHILDREN))
    # macOS counts bytes, Linux kilobytes.
    return largest // (2**20 if sys.platform == "darwin" else 2**10)
