"""Which rows of a corpus are a part's, and which of those are encoded at once."""

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

# Text that is encoded at once: enough for numpy, little enough for the processor's cache.
GROUP_BYTES, GROUP_ROWS = 4_000_000, 4096


def part_of(batches: list[pa.RecordBatch], part: int, parts: int) -> list[pa.RecordBatch]:
    """The record batches that start in the part-th (from 1) of `parts` equal stretches of bytes."""
    sizes = np.array([batch.nbytes for batch in batches], np.int64)
    starts = np.cumsum(sizes) - sizes
    belongs = starts * parts // max(int(sizes.sum()), 1) == part - 1
    return [batch for batch, own in zip(batches, belongs) if own]


def groups_of(batches: list[pa.RecordBatch], schema: pa.Schema) -> Iterator[pa.Table]:
    """Tables of about GROUP_BYTES, one row at least."""
    waiting: list[pa.RecordBatch] = []
    for batch in batches:
        size = rows = 0
        for one in waiting:
            size, rows = size + one.nbytes, rows + len(one)
        if waiting and (size + batch.nbytes > GROUP_BYTES or rows + len(batch) > GROUP_ROWS):
            yield from _halved(pa.Table.from_batches(waiting, schema))
            waiting = []
        if len(batch):
            waiting.append(batch)
    if waiting:
        yield from _halved(pa.Table.from_batches(waiting, schema))


def _halved(table: pa.Table) -> Iterator[pa.Table]:
    """The table, or its halves, or theirs, none of them far above GROUP_BYTES."""
    if len(table) > 1 and table.nbytes > 2 * GROUP_BYTES:
        half = len(table) // 2
        yield from _halved(table.slice(0, half))
        yield from _halved(table.slice(half))
    else:
        yield table
