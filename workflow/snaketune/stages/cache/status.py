"""The status of results on disk, compared with the config: which are missing, current or stale, and why.

Snakemake compares times and its own records in `.snakemake`, which may be missing after results were copied. A result's
manifest records everything that it was made from, so it alone decides: the spec, the code, what can be read from each input,
the content of each external file, and whether the payload is complete (by size; readers verify its digests).
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from snaketune.artifacts.digests import digest_bytes
from snaketune.artifacts.manifest import content_digest, is_damaged
from snaketune.artifacts.plain_json import parse_json
from snaketune.files import digest_file
from snaketune.locations import located
from snaketune.stages.cache.code_digest import accepted_codes
from snaketune.stages.cache.fingerprint import cached_entries
from snaketune.stages.cache.work_folders import WORK_ROOT
from snaketune.stages.declaration import Stage
from snaketune.stages.job import Job
from snaketune.stages.races import ending_at, paused_at
from snaketune.stages.table import STAGES

MAX_NAMES = 4
# By role, name and digest of each input.
Read = dict[str, list[tuple[str, str]]]


@dataclass(frozen=True, kw_only=True)
class Status:
    """The status of one result.

    Attributes:
        manifest: None if it is missing or can't be read.
        why: the reasons why it is stale itself. A missing result has none.
        current: whether it is as the config wants it, and so is everything that it was made from.
        other_versions: libraries of another version than the one installed here: name, version made with, version here.
    """

    manifest: dict[str, Any] | None = None
    why: tuple[str, ...] = ()
    current: bool = False
    other_versions: tuple[tuple[str, str, str], ...] = ()


@dataclass(kw_only=True)
class Results:
    """The results of all jobs of a graph. Each is checked once, on first access.

    Attributes:
        code_of: the digest of a stage's code.
        is_forced: whether the user forces the job, whatever the status of its result (`--forcerun`).
        installed: the version of a library where jobs run; None if unknown.
        reruns_on: stages whose results are stale if they were made with other versions of libraries.
    """

    code_of: Callable[[str], str]
    is_forced: Callable[[Job], bool] = lambda job: False
    installed: Callable[[str], str | None] = lambda library: None
    reruns_on: Mapping[str, str] = field(default_factory=dict)
    _known: dict[str, Status] = field(default_factory=dict, init=False)
    _digests: dict[str, str] = field(default_factory=dict, init=False)
    _logged: set[str] = field(default_factory=set, init=False)

    def of(self, job: Job) -> Status:
        if job.manifest not in self._known:
            self._known[job.manifest] = self._check(job)
        return self._known[job.manifest]

    def _check(self, job: Job) -> Status:
        above = [self.of(upstream) for upstream in made_from(job)]
        try:
            text = Path(job.manifest).read_bytes()
            self._digests[job.manifest] = digest_bytes(text)
            manifest = parse_json(text)
            if is_damaged(manifest):
                return Status(why=("its manifest.json is damaged",))
            versions = tuple(
                (library, made_with, here)
                for library, made_with in manifest["versions"].items()
                if made_with and (here := self.installed(library)) and here != made_with
            )
            why = tuple(self._reasons(job, manifest, above))
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return Status()
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            return Status(why=("its manifest.json can't be read",))
        if versions and self.reruns_on.get(job.stage) == "versions":
            why += (f"other versions ({_some([f'{name} {then} → {here}' for name, then, here in versions])})",)
        decided = job.race is None or self.of(job.race).current
        current = not why and decided and all(status.current for status in above) and not self.is_forced(job)
        return Status(manifest=manifest, why=why, current=current, other_versions=versions)

    def _reasons(self, job: Job, manifest: dict[str, Any], above: list[Status]) -> Iterator[str]:
        """Yield why a result itself is stale. Args: above: the status of each result that the job reads."""
        if keys := differing(manifest["spec"], self._expected_spec(job, manifest["spec"])):
            yield f"spec differs ({_some(keys)})"
        code = self.code_of(job.stage)
        if manifest["code"] != code and manifest["code"] not in accepted_codes(job.stage, code, WORK_ROOT.parent):
            yield f"the code of stage {job.stage} has changed"
        if missing := sorted(
            {upstream.key for upstream, status in zip(made_from(job), above) if status.manifest is None}
        ):
            yield f"missing input ({_some(missing)})"
        else:
            yield from self._inputs(job, manifest["inputs"])
        files = manifest["payload"] | manifest["records"]
        if missing := [name for name, entry in files.items() if _size(Path(job.payload) / name) != entry["bytes"]]:
            edits = "they are published again, without edits: edit a copy of the folder"
            yield f"files are missing or of another size ({_some(missing)}); {edits}"
        elif not Path(job.run).is_file():
            yield "run.json is missing"

    def _expected_spec(self, job: Job, made_by: dict[str, Any]) -> dict[str, Any]:
        """The spec of a job, as its race has decided. Args: made_by: that of the result, which ends where it may."""
        if not job.race:
            return job.plain_spec
        # Without a decision, where the result ends is no reason: the missing race is.
        undecided = self.of(job.race).manifest is None
        share = made_by["training"].get("until") if undecided else paused_at(Path(job.race.manifest), job.key)
        return ending_at(job.plain_spec, share)

    def _inputs(self, job: Job, made_from_digests: dict[str, list[str]]) -> Iterator[str]:
        read = self.inputs_read(job)
        differ: list[str] = []
        for role in sorted(read.keys() | made_from_digests.keys()):
            now, before = read.get(role, []), made_from_digests.get(role, [])
            if len(before) != len(now):
                differ.append(f"{role}: {len(now)}, not {len(before)}")
            differ += [name for (name, digest), then in zip(now, before) if digest != then]
        if differ:
            yield f"changed input ({_some(differ)})"

    def inputs_read(self, job: Job) -> Read:
        """Name and digest of every input by role, as the job's manifest would have them now."""
        stage = STAGES[job.stage]
        if stage.reads_manifests:
            # As they are: the report reads run.json too.
            return {role: [*map(self._as_file, paths)] for role, paths in inputs_by_role(job).items()}
        inputs = {
            role: [(upstream.key, self._counted(stage, role, upstream)) for upstream in jobs]
            for role, jobs in job.artifacts.items()
        }
        for role, files in job.files.items():
            inputs[role] = [(str(path), entry) for path, entry in cached_entries(role, map(located, files), WORK_ROOT)]
        return inputs

    def _counted(self, stage: Stage, role: str, upstream: Job) -> str:
        """The digest of what a stage reads of a result, as `fingerprint.read_artifacts` does."""
        if (manifest := self.of(upstream).manifest) is None:
            return ""
        if entry := stage.digested_by.get(role):
            return str(manifest.get(entry))
        return content_digest(manifest, stage.inputs[role].entries)

    def _as_file(self, path: str) -> tuple[str, str]:
        if path not in self._digests:
            self._digests[path] = digest_file(Path(path)) if Path(path).is_file() else ""
        return path.removeprefix("results/"), self._digests[path]

    def log_lines(self, job: Job) -> Iterator[str]:
        """Yield lines that say why the job and everything that it is made from are stale, and which current results were made
        with other versions of libraries. Each job is reported once."""
        stale: dict[tuple[str, str], list[str]] = {}
        versions: dict[tuple[str, str, str], list[str]] = {}
        for node in self._not_logged(job):
            status = self.of(node)
            for why in status.why:
                stale.setdefault((node.stage, why), []).append(node.key)
            for version in status.other_versions if status.current else ():
                versions.setdefault(version, []).append(node.key)
        for (_, why), names in stale.items():
            yield f"stale: {_some(names)}: {why}"
        for (library, made_with, here), names in sorted(versions.items()):
            count = f"{len(names)} result{'s' if len(names) > 1 else ''}"
            yield f"made with {library} {made_with}, here is {here}: {count} ({_some(names)})"

    def _not_logged(self, job: Job) -> Iterator[Job]:
        if job.manifest not in self._logged:
            self._logged.add(job.manifest)
            for upstream in made_from(job):
                yield from self._not_logged(upstream)
            yield job


def made_from(job: Job) -> Iterable[Job]:
    return chain.from_iterable(job.artifacts.values())


def inputs_by_role(job: Job) -> dict[str, list[str]]:
    """The paths that a job reads, by role; SnaketuneError if a result that the report compares with doesn't exist."""
    stage = STAGES[job.stage]
    if not stage.reads_manifests:
        paths = {role: [upstream.manifest for upstream in jobs] for role, jobs in job.artifacts.items()}
        return paths | {role: list(files) for role, files in job.files.items()}
    jobs = list(made_from(job))
    files = {"manifests": [upstream.manifest for upstream in jobs], "runs": [upstream.run for upstream in jobs]}
    if stage.further_files:
        files |= stage.further_files(job.spec)
    return {role: files[role] for role in stage.files}


def differing(then: Any, now: Any, key: str = "") -> list[str]:
    """The dotted keys whose values differ, with both values if they are short.

    >>> differing({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}})
    ['a.c: 2 → 3']
    """
    if isinstance(then, dict) and isinstance(now, dict):
        keys = dict.fromkeys((*now, *then))
        return [line for k in keys for line in differing(then.get(k), now.get(k), f"{key}.{k}" if key else k)]
    if then == now:
        return []
    values = f"{json.dumps(then)} → {json.dumps(now)}"
    return [f"{key}: {values}" if len(values) <= 60 else key]


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else -1


def _some(names: list[str]) -> str:
    """Join the first names, with the number of the others.

    >>> _some(list("abcdef"))
    'a, b, c, d and 2 more'
    """
    more = len(names) - MAX_NAMES
    return ", ".join(names[:MAX_NAMES]) + (f" and {more} more" if more > 0 else "")
