"""In which data type and by which kernel a training has computed: who goes on with it on another machine may choose otherwise.

checkpoint-N/computed_as.json    one after another, the last that of the process that wrote it
"""

import json
from pathlib import Path

from snaketune.artifacts.manifest import write_json

FILE = "computed_as.json"
# As `Compute.about` tells it.
Numerics = dict[str, str]


def save_numerics(folder: Path, ways: list[Numerics]) -> None:
    """Into a checkpoint."""
    write_json(folder / FILE, ways)


def numerics_history(folder: Path, now: Numerics, aloud: bool) -> list[Numerics]:
    """Those of a checkpoint that is gone on from, and the one of now; if that is another one, it is told."""
    ways = json.loads((folder / FILE).read_text(encoding="utf-8"))
    if ways[-1] == now:
        return ways
    if aloud:
        then, other = (", ".join(sorted(way.values())) for way in (ways[-1], now))
        print(f"{folder.name} was computed with {then}; goes on with {other}, so the result is of both", flush=True)
    return [*ways, now]
