"""Division of a corpus into parts, and of a part into groups of rows that are encoded together."""

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

# The size of a group: large enough for numpy to be efficient, small enough for the CPU's cache.
GROUP_BYTES, GROUP_ROWS = 4_000_000, 4096


def part_of(batches: list[pa.RecordBatch], part: int, parts: int) -> list[pa.RecordBatch]:
    """Return the record batches that start in the `part`-th (from 1) of `parts` equal byte ranges."""
    sizes = np.array([batch.nbytes for batch in batches], np.int64)
    starts = np.cumsum(sizes) - sizes
    belongs = starts * parts // max(int(sizes.sum()), 1) == part - 1
    return [batch for batch, own in zip(batches, belongs) if own]


def groups_of(batches: list[pa.RecordBatch], schema: pa.Schema) -> Iterator[pa.Table]:
    """Yield tables of about GROUP_BYTES, each of at least one row."""
    pending: list[pa.RecordBatch] = []
    for batch in batches:
        size = rows = 0
        for one in pending:
            size, rows = size + one.nbytes, rows + len(one)
        if pending and (size + batch.nbytes > GROUP_BYTES or rows + len(batch) > GROUP_ROWS):
            yield from _halved(pa.Table.from_batches(pending, schema))
            pending = []
        if len(batch):
            pending.append(batch)
    if pending:
        yield from _halved(pa.Table.from_batches(pending, schema))


def _halved(table: pa.Table) -> Iterator[pa.Table]:
    """Yield the table, halved recursively until no part is far above GROUP_BYTES."""
    if len(table) > 1 and table.nbytes > 2 * GROUP_BYTES:
        half = len(table) // 2
        yield from _halved(table.slice(0, half))
        yield from _halved(table.slice(half))
    else:
        yield table
