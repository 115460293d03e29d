"""Files of a corpus that are written once all rows are decided about: its order, and what was found to be alike."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa

from snaketune.corpus.decisions import Decisions
from snaketune.corpus.excerpts import excerpt
from snaketune.corpus.rows import ORDER_COLUMN, SPLITS, id_of
from snaketune.corpus.selecting.row_store import RowFormat
from snaketune.corpus.selecting.scanned_parts import ScannedParts

GROUPS_SHOWN = 1000
ROWS_SHOWN = 20


def write_order(parts: ScannedParts, copies: dict[str, np.ndarray], folder: Path) -> None:
    """Write the numbers that rows are ordered by, float64 for each row that is written to a split, per split."""
    order = parts.column("order")
    for split in SPLITS:
        table = pa.table({ORDER_COLUMN: np.repeat(order, copies[split])})
        with pa.ipc.new_file(str(folder / f"{split}-{ORDER_COLUMN}.arrow"), table.schema) as writer:
            writer.write_table(table)


def write_duplicates(parts: ScannedParts, format_: RowFormat, decisions: Decisions, path: Path) -> None:
    """List the first groups of near duplicates: size, ids of the first rows, and an excerpt of the first row."""
    group, hashes = decisions.group, parts.column("content")
    assert group is not None, "near duplicates are configured"
    sizes = np.bincount(group)
    shown = np.flatnonzero(sizes > 1)[:GROUPS_SHOWN]
    # Rows by group, stable, so that the rows of a group stay in order.
    members = np.flatnonzero(np.isin(group, shown))
    members = members[np.argsort(group[members], kind="stable")]
    ends = np.cumsum(sizes[shown])
    with path.open("w", encoding="utf-8") as file:
        for size, end, row in zip(sizes[shown].tolist(), ends.tolist(), parts.rows_at(shown.tolist(), format_)):
            line = {
                "rows": size,
                "ids": [id_of(int(hashes[member])) for member in members[end - size : end][:ROWS_SHOWN].tolist()],
                "excerpt": excerpt({name: value for name, value in row.items() if value is not None}),
            }
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
