"""Remove work that no published result came from."""

import json
import shutil
from pathlib import Path

from snaketune.artifacts.work import stale_work


def clean(work_root: Path, *, remove: bool) -> None:
    """Tell, and with `remove` free, what work folders hold that is behind no manifest below the results folder.

    Args:
        work_root: `results/.work`.
    """
    current = set()
    for manifest in work_root.parent.rglob("manifest.json"):
        if work_root not in manifest.parents:
            current.add(json.loads(manifest.read_text(encoding="utf-8")).get("fingerprint"))
    total = 0
    for folder, freed in stale_work(work_root, current):
        print(f"{'removed' if remove else 'would remove'} {folder}: {freed / 1e6:.1f} MB")
        total += freed
        if remove:
            shutil.rmtree(folder)
    print(f"{total / 1e6:.1f} MB {'freed' if remove else 'to free; add --remove'}; {len(current)} current results kept")
