"""Removal of work folders that no published result came from."""

import json
import shutil
from pathlib import Path

from snaketune.errors import SnaketuneError
from snaketune.stages.cache.work_folders import UNPUBLISHED, published_manifests
from snaketune.stages.host.locks import holder, is_free

# Below the work folders: generated responses by cache key (`evaluation/response_cache.py`). A name with a dot is no stage.
RESPONSES = ".responses"


def clean(work_root: Path, *, remove: bool) -> None:
    """List the work folders that no manifest below the results folder came from, and with `remove` delete them.

    Retained are the work of published results, results that the report compares with, folders in use, finished results that
    were never published, and unfinished trainings and reference passes, which can be resumed. Responses are retained if a
    published evaluation uses them; a running evaluation loses at most what it would have reused after being killed.

    Args:
        work_root: `results/.work`.
    """
    current, responses = set(), set()
    for manifest in published_manifests(work_root.parent):
        try:
            content = json.loads(manifest.read_text(encoding="utf-8"))
            current |= {content["fingerprint"], *content.get("compared", ())}
            # The key of an evaluation's responses.
            responses.add((content.get("generation") or {}).get("responses"))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise SnaketuneError(f"{manifest} is no snaketune manifest ({error!r}); remove it, or run again") from None
    total = 0
    folders = [*work_root.glob("[!.]*/*"), *work_root.glob(f"{RESPONSES}/*")]
    for folder in sorted(path for path in folders if path.is_dir() and path.name not in current | responses):
        if link := next((path for path in (folder.parent, folder) if path.is_symlink()), None):
            print(
                f"kept {folder}: {link} is a link to a folder that isn't part of these results; remove the link yourself"
            )
            continue
        if why := _in_use(folder):
            print(f"kept {folder}: {why}")
            continue
        # Removing one of several hard links to a file frees nothing.
        freed = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and path.stat().st_nlink == 1)
        print(f"{'removed' if remove else 'would remove'} {folder}: {freed / 1e6:.1f} MB")
        total += freed
        if remove:
            shutil.rmtree(folder)
    print(f"{total / 1e6:.1f} MB {'freed' if remove else 'to free; add --remove'}; {len(current)} current results kept")


def _in_use(folder: Path) -> str | None:
    for lock in folder.glob("*lock"):
        if not is_free(lock):
            return f"in use by {holder(lock)}"
    if any(folder.glob("state/checkpoints/checkpoint-*")):
        return "an unfinished training that resumes when its config runs again; remove the folder yourself if it won't"
    if any(folder.glob("state/chunks/*")):
        return "an unfinished reference pass that resumes when its config runs again; remove the folder yourself if it won't"
    if (folder / UNPUBLISHED).is_file() and (folder / "manifest.json").is_file():
        return (
            "a finished result that its config's next run publishes; remove the folder yourself if there won't be one"
        )
    return None
