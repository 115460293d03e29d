"""Runs of another time that the report is asked to compare with: where they lie, and which evaluations asked them.

`report.compare` names results' folders (`results/dpo/old`, `../before/results/sft/demo`) and fingerprints of kept work, whole
or as far as they are unique. Nothing is copied: their manifests count as inputs of the report by content, so that it is made
again when one changes, and only then. An evaluation belongs to a run by the content of the model that it read, whatever either
is called.
"""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from snaketune.artifacts.manifest import Artifact, read_artifact
from snaketune.config.paths import check_plain
from snaketune.errors import SnaketuneError
from snaketune.stages.cache.work_folders import WORK_ROOT
from snaketune.stages.table import STAGES

KEY = "report.compare"
COMPARED = ("sft", "dpo")
MIN_PREFIX_DIGITS = 8
FINGERPRINT = re.compile(r"[0-9a-f]{1,32}")


@dataclass(frozen=True, kw_only=True)
class ComparedResult:
    """One entry: what it is called in the config, its result, and what asked its model, by fingerprint."""

    entry: str
    manifest: Path
    evaluations: tuple[Path, ...]


def find_compared_results(entries: Iterable[str], work_root: Path = WORK_ROOT) -> list[ComparedResult]:
    """The results behind the entries, in their order.

    Raises:
        SnaketuneError: an entry that is no result of a training, or that two fit.
    """
    return [_compared(entry, work_root) for entry in entries]


def compared_files(entries: Iterable[str], work_root: Path = WORK_ROOT) -> dict[str, list[str]]:
    """What the report reads of them by role, as absolute paths, which no rule takes for what it makes."""
    found = find_compared_results(entries, work_root)
    runs = [one.manifest.with_name("run.json") for one in found]
    evaluations = dict.fromkeys(path for one in found for path in one.evaluations)
    return {
        "compared": [_absolute(one.manifest) for one in found],
        "compared_runs": [_absolute(path) for path in runs if path.is_file()],
        "compared_evals": [_absolute(path) for path in evaluations],
    }


def result_of(manifest: Path, stages: Iterable[str]) -> Artifact:
    """A result from anywhere, published or kept as work.

    Raises:
        SnaketuneError: its manifest can't be read, is of no such stage, or a file of it lies elsewhere.
    """
    try:
        said = json.loads(manifest.read_text(encoding="utf-8"))
        stage = said["stage"]
        shaped = all(isinstance(said[key], dict) for key in ("spec", "inputs", "counts", "versions"))
        shaped = shaped and all(isinstance(digests, list) for digests in said["inputs"].values())
        shaped = shaped and all(isinstance(said[key], str) for key in ("stage", "code", "fingerprint"))
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise SnaketuneError(f"{manifest} is no snaketune manifest ({error!r})") from None
    if not shaped:
        raise SnaketuneError(f"{manifest} is no snaketune manifest: it doesn't say what its result was made of")
    if stage not in stages:
        raise SnaketuneError(f"{manifest} is of stage {stage!r}; expected {' or '.join(stages)}")
    published = manifest.parent / STAGES[stage].payload
    artifact = read_artifact(manifest, STAGES[stage].payload if published.is_dir() else "payload")
    folder = manifest.parent.resolve()
    for path in (manifest, manifest.with_name("run.json"), *(artifact.folder / name for name in said["payload"])):
        if not path.resolve().is_relative_to(folder):
            raise SnaketuneError(f"{path} is a link to {path.resolve()}, out of its result; put the file itself there")
    return artifact


def _compared(entry: str, work_root: Path) -> ComparedResult:
    check_plain(KEY, entry)
    folder = _folder(entry, work_root)
    manifest = folder / "manifest.json"
    try:
        content = result_of(manifest, COMPARED).content
    except SnaketuneError as error:
        raise SnaketuneError(f"{KEY}: {entry!r}: {error}") from None
    by_fingerprint = dict(_evaluations(_results_of(folder), content))
    return ComparedResult(
        entry=entry, manifest=manifest, evaluations=tuple(path for _, path in sorted(by_fingerprint.items()))
    )


def _folder(entry: str, work_root: Path) -> Path:
    folder = Path(entry)
    if folder.is_dir():
        if not (folder / "manifest.json").is_file():
            raise SnaketuneError(
                f"{KEY}: {entry!r} has no manifest.json; expected the folder of one result, such as results/dpo/NAME"
            )
        return folder
    if not FINGERPRINT.fullmatch(entry):
        raise SnaketuneError(
            f"{KEY}: there is no folder {entry!r}; expected one of a result, or a fingerprint of kept work"
        )
    if len(entry) < MIN_PREFIX_DIGITS:
        raise SnaketuneError(
            f"{KEY}: there is no folder {entry!r}, and as the beginning of a fingerprint it is too short; expected {MIN_PREFIX_DIGITS} "
            "digits or more"
        )
    fit = sorted(path for stage in COMPARED for path in (work_root / stage).glob(f"{entry}*") if path.is_dir())
    done = [path for path in fit if (path / "manifest.json").is_file()]
    if len(done) > 1:
        raise SnaketuneError(f"{KEY}: {entry!r} fits {' and '.join(map(str, done))}; give more digits")
    if not done:
        why = (
            f"{fit[0]} isn't finished: it has no manifest.json"
            if fit
            else f"no kept work of a training in {work_root} fits"
        )
        raise SnaketuneError(f"{KEY}: {entry!r}: {why}; `snakemake clean_work` may have freed it")
    return done[0]


def _results_of(folder: Path) -> Path:
    """The results that a result lies among.

    >>> _results_of(Path("a/results/dpo/old")), _results_of(Path("results/.work/dpo/00ff"))
    (PosixPath('a/results'), PosixPath('results'))
    """
    results = folder.parent.parent
    return results.parent if results.name == WORK_ROOT.name else results


def _evaluations(results: Path, content: str) -> Iterator[tuple[str, Path]]:
    """Fingerprint and manifest of all finished evaluations that read a model of this content; those that are kept as work last,
    since a published one may be another one's before the report reads it."""
    kept = f"{WORK_ROOT.name}/eval/*/manifest.json"
    for path in (*sorted(results.glob("eval/*/*/manifest.json")), *sorted(results.glob(kept))):
        try:
            said = json.loads(path.read_text(encoding="utf-8"))
            if said["inputs"]["model"][:1] == [content]:
                yield said["fingerprint"], path
        except (OSError, ValueError, LookupError, TypeError):
            # Nobody named it: what can't be read is told where it is somebody's result.
            continue


def _absolute(path: Path) -> str:
    return str(path.absolute())
