"""The last pass: the selected rows, written to the files of the result batch by batch.

    train-00000.arrow, held_out-00000.arrow, …    ROWS_PER_FILE rows each, the last of a split fewer

Each file is written by itself, so that jobs can share them, and all of them give the same bytes however many jobs there are.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

from snaketune.artifacts.split_files import file_name
from snaketune.corpus.rows import SPLITS, id_of
from snaketune.corpus.selecting.row_store import ROWS_PER_BATCH, RowFormat
from snaketune.corpus.selecting.scanned_parts import ScannedParts
from snaketune.progress import progress

# What `decide` writes besides the records: counts; and how often each row is written to each split.
FACTS, ROWS_WRITTEN = "facts.json", "rows_written.arrow"
ROWS_PER_FILE = 256 * ROWS_PER_BATCH


def write_files(
    parts: ScannedParts, format_: RowFormat, copies: dict[str, np.ndarray], folder: Path, part: int = 1, count: int = 1
) -> int:
    """Write the share of the files that one of `count` jobs has, `part` from 1. Return their rows.

    Args:
        copies: by split, how many times each row is written, uint8[rows].
    """
    files = [
        (split, number)
        for split in SPLITS
        for number in range(max(1, -(-int(copies[split].sum(dtype=np.int64)) // ROWS_PER_FILE)))
    ]
    share = files[len(files) * (part - 1) // count : len(files) * part // count]
    rows = 0
    for split, number in progress(share, "writing", "files", len(share)):
        path = folder / file_name(split, number)
        with pa.ipc.new_file(str(path), format_.result) as writer:
            selected = _selected(parts, format_, copies[split], number * ROWS_PER_FILE)
            for batch in _full_batches(selected, format_.result):
                writer.write_batch(batch)
                rows += batch.num_rows
    return rows


def _selected(parts: ScannedParts, format_: RowFormat, copies: np.ndarray, first: int) -> Iterator[pa.RecordBatch]:
    """Yield the rows from `first` on of those written to a split, ROWS_PER_FILE at most."""
    # The rows written so far; and where the file begins and ends among them.
    written, end = 0, first + ROWS_PER_FILE
    for part in parts:
        of_part = copies[part.rows]
        total = int(of_part.sum(dtype=np.int64))
        if written + total > first and written < end:
            before = written + np.concatenate([[0], np.cumsum(of_part, dtype=np.int64)])
            start = int(np.searchsorted(before[1:], first, side="right"))
            content, sources = part.column("content"), np.zeros(len(of_part), np.int16)
            for number, rows in part.rows_by_source:
                sources[rows] = number
            for row, batch in part.batches(format_, start):
                if before[row] >= end:
                    return
                rows = slice(row, row + batch.num_rows)
                span = max(first, before[row]), min(end, before[rows.stop])
                if span[0] < span[1]:
                    yield _batch(batch, rows, of_part[rows], before[row], span, content, sources, format_)
        written += total


def _batch(
    batch: pa.RecordBatch,
    rows: slice,
    copies: np.ndarray,
    before: int,
    span: tuple[int, int],
    content: np.ndarray,
    sources: np.ndarray,
    format_: RowFormat,
) -> pa.RecordBatch:
    """A batch's rows as often as they are written, of those from `span[0]` to `span[1]` among all that are written.

    Args:
        rows: the batch's, in the part.
        before: how many are written before the batch.
        content, sources: the hash and the source of each row of the part.
    """
    indices = np.repeat(np.arange(len(copies)), copies)
    numbers = np.arange(len(indices)) - np.repeat(np.cumsum(copies, dtype=np.int64) - copies, copies) + 1
    taken = slice(span[0] - before, span[1] - before)
    indices, numbers = indices[taken], numbers[taken]
    hashes = content[rows][indices].tolist()
    # The ids of further copies end in -2, -3, ….
    ids = [id_of(content) + (f"-{number}" if number > 1 else "") for content, number in zip(hashes, numbers.tolist())]
    columns = dict(zip(batch.schema.names, batch.take(pa.array(indices)).columns, strict=True))
    columns |= {"id": pa.array(ids, pa.string()), "source": pa.array(sources[rows][indices])}
    return pa.record_batch(columns, schema=format_.result)


def _full_batches(batches: Iterator[pa.RecordBatch], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yield the same rows in batches of ROWS_PER_BATCH; the last may have fewer."""
    # Concatenated with no rows, a batch has buffers of its own, of the exact size. A slice would be written with bytes of the
    # rows after it, up to a multiple of 64, so that a file would depend on where its rows were read.
    empty = pa.RecordBatch.from_arrays([pa.array([], field.type) for field in schema], schema=schema)
    pending: list[pa.RecordBatch] = []
    rows = 0
    for batch in batches:
        pending.append(batch)
        rows += batch.num_rows
        while rows >= ROWS_PER_BATCH:
            together = pa.concat_batches(pending)
            yield pa.concat_batches([empty, together.slice(0, ROWS_PER_BATCH)])
            rows -= ROWS_PER_BATCH
            pending = [together.slice(ROWS_PER_BATCH)]
    if rows:
        yield pa.concat_batches([empty, *pending])
