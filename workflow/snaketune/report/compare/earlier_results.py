"""Results of earlier runs that the report compares with: their manifests, and the evaluations of their models.

An entry of `report.compare` is the folder of a result (`results/dpo/old`, `../before/results/sft/demo`) or the fingerprint of a
cached result, whole or a unique prefix. Nothing is copied: the manifests are inputs of the report by content, so the report is
made again exactly when one of them changes. An evaluation belongs to a run if it read a model of the same content, whatever the
names are.
"""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from snaketune.artifacts.manifest import Artifact, read_artifact
from snaketune.artifacts.plain_json import parse_json
from snaketune.config.base import check_plain
from snaketune.errors import SnaketuneError
from snaketune.report.compare.forms import Manifest, check
from snaketune.stages.cache.work_folders import WORK_ROOT
from snaketune.stages.table import STAGES

KEY = "report.compare"
COMPARED = ("sft", "dpo")
MIN_PREFIX_DIGITS = 8
FINGERPRINT = re.compile(r"[0-9a-f]{1,32}")
UNREADABLE = OSError, ValueError, LookupError, TypeError


def compared_files(entries: Iterable[str]) -> dict[str, list[str]]:
    """The files that the report reads of these results, by role, as absolute paths, which match no rule's outputs.

    Raises:
        SnaketuneError: An entry names no result of a training, or more than one.
    """
    manifests, evaluations = [], []
    for entry in entries:
        check_plain(KEY, entry)
        folder = _folder(entry)
        try:
            content = result_of(folder / "manifest.json", COMPARED).content
        except SnaketuneError as error:
            raise SnaketuneError(f"{KEY}: {entry!r}: {error}") from None
        manifests.append(folder / "manifest.json")
        by_fingerprint = dict(_evaluations(_results_of(folder), content))
        evaluations += [path for _, path in sorted(by_fingerprint.items())]
    runs = [manifest.with_name("run.json") for manifest in manifests]
    files = {"compared": manifests, "compared_runs": [path for path in runs if path.is_file()]}
    files |= {"compared_evals": dict.fromkeys(evaluations)}
    return {role: [str(path.absolute()) for path in paths] for role, paths in files.items()}


def result_of(manifest: Path, stages: Iterable[str]) -> Artifact:
    """Read a result, published or in a work folder, in this repository or another one.

    Raises:
        SnaketuneError: Its manifest can't be read or is of another stage, or one of its files is a link out of its folder.
    """
    try:
        content = check(manifest, Manifest, parse_json(manifest.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise SnaketuneError(f"{manifest} is no snaketune manifest ({error})") from None
    if content["stage"] not in stages:
        raise SnaketuneError(f"{manifest} is of stage {content['stage']!r}; expected {' or '.join(stages)}")
    published = STAGES[content["stage"]].payload
    artifact = read_artifact(manifest, published if (manifest.parent / published).is_dir() else "payload")
    folder = manifest.parent.resolve()
    for path in (manifest, manifest.with_name("run.json"), *(artifact.folder / name for name in content["payload"])):
        if not path.resolve().is_relative_to(folder):
            raise SnaketuneError(
                f"{path} is a link to {path.resolve()}, outside its result; replace it by the file itself"
            )
    return artifact


def _folder(entry: str) -> Path:
    """The folder of the result that an entry names."""
    folder = Path(entry)
    if folder.is_dir():
        if not (folder / "manifest.json").is_file():
            raise SnaketuneError(
                f"{KEY}: {entry!r} has no manifest.json; expected the folder of one result, such as results/dpo/NAME"
            )
        return folder
    if not FINGERPRINT.fullmatch(entry):
        raise SnaketuneError(
            f"{KEY}: there is no folder {entry!r}; expected the folder of a result, or the fingerprint of a cached one"
        )
    if len(entry) < MIN_PREFIX_DIGITS:
        raise SnaketuneError(
            f"{KEY}: there is no folder {entry!r}, and it is too short for a fingerprint; expected {MIN_PREFIX_DIGITS} digits "
            "or more"
        )
    matches = sorted(path for stage in COMPARED for path in (WORK_ROOT / stage).glob(f"{entry}*") if path.is_dir())
    done = [path for path in matches if (path / "manifest.json").is_file()]
    if len(done) > 1:
        raise SnaketuneError(f"{KEY}: {entry!r} fits {' and '.join(map(str, done))}; give more digits")
    if not done:
        why = f"no cached training in {WORK_ROOT} matches"
        if matches:
            why = f"{matches[0]} isn't finished: it has no manifest.json"
        raise SnaketuneError(f"{KEY}: {entry!r}: {why}; `snakemake clean_work` may have removed it")
    return done[0]


def _results_of(folder: Path) -> Path:
    """The results folder that a result is in.

    >>> _results_of(Path("a/results/dpo/old")), _results_of(Path("results/.work/dpo/00ff"))
    (PosixPath('a/results'), PosixPath('results'))
    """
    results = folder.parent.parent
    return results.parent if results.name == WORK_ROOT.name else results


def _evaluations(results: Path, content: str) -> Iterator[tuple[str, Path]]:
    """Yield fingerprint and manifest of each finished evaluation of a model of this content.

    Those in work folders are the last, as a published one may be replaced before the report reads it.
    """
    in_work_folders = f"{WORK_ROOT.name}/eval/*/manifest.json"
    for path in (*sorted(results.glob("eval/*/*/manifest.json")), *sorted(results.glob(in_work_folders))):
        try:
            evaluation = parse_json(path.read_text(encoding="utf-8"))
            if evaluation["inputs"]["model"][:1] == [content]:
                yield str(evaluation["fingerprint"]), path
        except UNREADABLE:
            # The config doesn't name this file; if it is part of a result that is read, that reader reports it.
            continue
