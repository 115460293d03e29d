"""Remove work that no published result came from."""

import json
import shutil
from pathlib import Path

from snaketune.errors import SnaketuneError
from snaketune.stages.cache.work_folders import UNPUBLISHED, published_manifests
from snaketune.stages.host.locks import holder, is_free

# Below the work folders: what models wrote, by key (`evaluation/response_cache.py`). A name with a dot is no stage.
RESPONSES = ".responses"


def clean(work_root: Path, *, remove: bool) -> None:
    """Tell, and with `remove` free, what work folders hold that no manifest below the results folder came from.

    Kept are the work of published results, what the report compares them with, what somebody is working on, what is finished
    and was never published, and killed trainings and reference passes that can still be resumed. Responses are kept if a
    published evaluation has some of them; one that is at work loses nothing but what a killed one would find again.

    Args:
        work_root: `results/.work`.
    """
    current, responses = set(), set()
    for manifest in published_manifests(work_root.parent):
        try:
            said = json.loads(manifest.read_text(encoding="utf-8"))
            current |= {said["fingerprint"], *said.get("compared", ())}
            # Of an evaluation, the key of its responses.
            responses.add((said.get("generation") or {}).get("responses"))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise SnaketuneError(f"{manifest} is no snaketune manifest ({error!r}); remove it, or run again") from None
    total = 0
    worked_in = [*work_root.glob("[!.]*/*"), *work_root.glob(f"{RESPONSES}/*")]
    for folder in sorted(path for path in worked_in if path.is_dir() and path.name not in current | responses):
        if link := next((path for path in (folder.parent, folder) if path.is_symlink()), None):
            print(f"kept {folder}: {link} is a link, and what it leads to is no work of ours; remove the link by hand")
            continue
        if why := _in_use(folder):
            print(f"kept {folder}: {why}")
            continue
        # A file that is also published elsewhere (hard link) frees nothing.
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
        return "an unfinished training that resumes when its config runs again; remove the folder by hand if it won't"
    if any(folder.glob("state/chunks/*")):
        return "an unfinished reference pass that resumes when its config runs again; remove the folder by hand if it won't"
    if (folder / UNPUBLISHED).is_file() and (folder / "manifest.json").is_file():
        return "a finished result that isn't published yet, as its config's next run does; if none comes, remove it by hand"
    return None
