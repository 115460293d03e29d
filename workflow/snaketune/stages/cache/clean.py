"""Removal of work folders that no published result came from."""

import shlex
import shutil
from collections.abc import Collection
from pathlib import Path

from snaketune.stages.cache.work_folders import WorkFolder, published_results
from snaketune.stages.host.locks import holder, is_free
from snaketune.stages.table import STAGES

# Below the work folders: values of single rows, by cache key (`stages/cache/row_store.py`). A name with a dot is no stage.
ROWS = ".rows"
# Of unfinished work: files that are named by the keys of the rows that it adds.
ADDED_ROWS = "state/rows/*"
RESUMES = "resumes when its config runs again; remove the folder yourself if it won't"


def clean(work_root: Path, *, remove: bool, named: Collection[Path] = ()) -> None:
    """List the work folders that no manifest below the results folder came from, and with `remove` delete them.

    Retained are the work of published results and of those that the report compares with, folders in use, finished results that
    were never published, unfinished trainings and reference passes, and responses and rows that a published result uses; a
    running evaluation loses at most what it would have reused after being killed.

    Args:
        work_root: `results/.work`.
        named: The manifests of the config's results; others are listed, with the command that removes them. Empty if unknown.
    """
    current, reused = set(), {path.name for path in work_root.glob(f"[!.]*/*/{ADDED_ROWS}")}
    unnamed: dict[Path, float] = {}
    for result in published_results(work_root.parent):
        # Results of a smoke run lie in a folder that is no stage's.
        folder = result.manifest_path.parent
        if named and result.manifest_path not in named and folder.relative_to(work_root.parent).parts[0] in STAGES:
            unnamed[folder] = _size(folder) / 1e6
        current |= {result.manifest["fingerprint"], *result.manifest.get("compared", ())}
        responses = (result.manifest.get("generation") or {}).get("responses")
        reused |= {responses, *result.manifest.get("rows", ())}
    total = 0
    folders = [path for kind in ("[!.]*", ROWS) for path in work_root.glob(f"{kind}/*")]
    for folder in sorted(path for path in folders if path.is_dir() and path.name not in current | reused):
        if why := _retained(folder):
            print(f"kept {folder}: {why}")
            continue
        # Removing one of several hard links to a file frees nothing.
        freed = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and path.stat().st_nlink == 1)
        print(f"{'removed' if remove else 'would remove'} {folder}: {freed / 1e6:.1f} MB")
        total += freed
        if remove:
            shutil.rmtree(folder)
    for folder, megabytes in unnamed.items():
        print(f"kept {folder}: published, but this config doesn't name it; {megabytes:.1f} MB")
    if unnamed:
        print(
            "to remove what no config of yours needs: rm -r", shlex.join(map(str, unnamed)), "&& snakemake clean_work"
        )
    print(f"{total / 1e6:.1f} MB {'freed' if remove else 'to free; add --remove'}; {len(current)} current results kept")


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _retained(folder: Path) -> str | None:
    if link := next((path for path in (folder.parent, folder) if path.is_symlink()), None):
        return f"{link} is a link to a folder that isn't part of these results; remove the link yourself"
    if lock := next((lock for lock in folder.glob("*lock") if not is_free(lock)), None):
        return f"in use by {holder(lock)}"
    work = WorkFolder(folder)
    if any(folder.glob("state/checkpoints/checkpoint-*")) and not work.manifest.is_file():
        return f"an unfinished training that {RESUMES}"
    if any(folder.glob(ADDED_ROWS)):
        return f"an unfinished reference pass that {RESUMES}"
    if work.unpublished.is_file() and work.manifest.is_file():
        return (
            "a finished result that its config's next run publishes; remove the folder yourself if there won't be one"
        )
    return None
