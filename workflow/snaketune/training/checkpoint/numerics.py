"""The numerics of a training (data type, attention kernel), which may change when it is resumed on another machine.

checkpoint-N/computed_as.json    a list in order of use; the last entry is that of the process that wrote the checkpoint
"""

import json
from pathlib import Path

from snaketune.artifacts.manifest import write_json

FILE = "computed_as.json"
# The return value of `Compute.about`.
Numerics = dict[str, str]


def save_numerics(folder: Path, history: list[Numerics]) -> None:
    """Write the numerics of a training to a checkpoint."""
    write_json(folder / FILE, history)


def numerics_history(folder: Path, current: Numerics, is_main: bool) -> list[Numerics]:
    """Return the numerics of the checkpoint that is resumed from, and the current ones if they differ.

    Args:
        is_main: whether this is the main process, which prints a difference.
    """
    history = json.loads((folder / FILE).read_text(encoding="utf-8"))
    if history[-1] == current:
        return history
    if is_main:
        before, now = (", ".join(sorted(numerics.values())) for numerics in (history[-1], current))
        print(f"{folder.name} was computed with {before}; resuming with {now}, so the result mixes both", flush=True)
    return [*history, current]
