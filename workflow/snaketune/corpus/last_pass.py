"""The last pass: the selected rows of the spool, written to the files of the result batch by batch."""

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from snaketune.corpus.decisions import Decisions
from snaketune.corpus.excerpts import excerpt
from snaketune.corpus.first_pass import Scan, SourceCounts
from snaketune.corpus.rows import ORDER_COLUMN, id_of
from snaketune.corpus.selecting.spool import ROWS_PER_BATCH
from snaketune.progress import progress

GROUPS_SHOWN = 1000
ROWS_SHOWN = 20


def write_rows(scan: Scan, sources: list[SourceCounts], decisions: Decisions, folder: Path) -> None:
    """Write `train.arrow` and `held_out.arrow`, in the order of the spool; ids of further copies end in `-2`, `-3`, …."""
    spool, schema = scan.spool, scan.spool.result_schema
    hashes, copies, held_out = np.asarray(scan.hashes), decisions.copies, decisions.held_out
    source_of = np.repeat(
        np.arange(len(sources), dtype=np.int16), [counts.rows.stop - counts.rows.start for counts in sources]
    )
    with SplitFile(folder / "train.arrow", schema) as train, SplitFile(folder / "held_out.arrow", schema) as held:
        for start, batch in progress(spool.batches(), "writing", "batches", -(-len(hashes) // ROWS_PER_BATCH)):
            rows = slice(start, start + batch.num_rows)
            for split, in_split in ((train, ~held_out[rows]), (held, held_out[rows])):
                indices = np.repeat(np.arange(batch.num_rows), copies[rows] * in_split)
                if len(indices):
                    ids, source = _ids(hashes[rows], indices), source_of[rows][indices]
                    split.append(batch.take(pa.array(indices)), id=ids, source=source)


def write_order(scan: Scan, decisions: Decisions, folder: Path) -> None:
    """Write the numbers that rows are ordered by, float64 for each row of `train.arrow` and of `held_out.arrow`, per split."""
    for split, in_split in (("train", ~decisions.held_out), ("held_out", decisions.held_out)):
        table = pa.table({ORDER_COLUMN: np.repeat(np.asarray(scan.order), decisions.copies * in_split)})
        with pa.ipc.new_file(str(folder / f"{split}-{ORDER_COLUMN}.arrow"), table.schema) as writer:
            writer.write_table(table)


def write_duplicates(scan: Scan, group: np.ndarray, path: Path) -> None:
    """List the first groups of near duplicates: size, ids of the first rows, and an excerpt of the first row."""
    sizes = np.bincount(group)
    shown = np.flatnonzero(sizes > 1)[:GROUPS_SHOWN]
    # Rows by group, stable, so that the rows of a group stay in order.
    members = np.flatnonzero(np.isin(group, shown))
    members = members[np.argsort(group[members], kind="stable")]
    ends = np.cumsum(sizes[shown])
    with path.open("w", encoding="utf-8") as file:
        for size, end, row in zip(sizes[shown].tolist(), ends.tolist(), scan.spool.rows(shown.tolist())):
            line = {
                "rows": size,
                "ids": [id_of(scan.hashes[member]) for member in members[end - size : end][:ROWS_SHOWN].tolist()],
                "excerpt": excerpt({name: value for name, value in row.items() if value is not None}),
            }
            file.write(json.dumps(line, ensure_ascii=False) + "\n")


class SplitFile(ExitStack):
    """One file of the result. All batches but the last are full, so the same rows always give the same bytes."""

    def __init__(self, path: Path, schema: pa.Schema):
        super().__init__()
        self.schema = schema
        self.writer = self.enter_context(pa.ipc.new_file(str(path), schema))
        self.pending: list[pa.RecordBatch] = []
        self.rows = 0
        self.callback(self._finish)

    def append(self, batch: pa.RecordBatch, **extra_columns: Any) -> None:
        """Append a batch of the spool; `extra_columns` are those that the spool doesn't have."""
        columns = dict(zip(batch.schema.names, batch.columns, strict=True)) | extra_columns
        self.pending.append(pa.record_batch(columns, schema=self.schema))
        self.rows += batch.num_rows
        while self.rows >= ROWS_PER_BATCH:
            self._write(ROWS_PER_BATCH)

    def _finish(self) -> None:
        if self.rows:
            self._write(self.rows)

    def _write(self, rows: int) -> None:
        together = pa.concat_batches(self.pending)
        self.writer.write_batch(together.slice(0, rows))
        self.pending = [together.slice(rows)]
        self.rows -= rows


def _ids(hashes: np.ndarray, indices: np.ndarray) -> list[str]:
    ids = [id_of(content) for content in hashes[indices].tolist()]
    copy = 1
    for position in (np.flatnonzero(indices[1:] == indices[:-1]) + 1).tolist():
        copy = copy + 1 if "-" in ids[position - 1] else 2
        ids[position] += f"-{copy}"
    return ids
