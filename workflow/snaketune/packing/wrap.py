"""Rows as in pre-training: all sequences concatenated, and cut at every row's end.

The rest of a cut sequence is a segment of its own, which doesn't attend to the tokens before the cut.
"""

from collections.abc import Iterable

import numpy as np
import pyarrow as pa

from snaketune.packing.best_fit import PackingPlan
from snaketune.packing.conversation_overflow import DropCounts, PlannedSegments


def wrap(
    whole: PlannedSegments, index: Iterable[pa.RecordBatch], row_length: int, drops: DropCounts
) -> tuple[PlannedSegments, PackingPlan]:
    """Cut sequences into rows that are all full but the last.

    Args:
        whole: the whole sequences, in order.
        index: the split's token index as `tokenize` wrote it, for the supervised runs.
        drops: updated with the sequences that are split.
    """
    ends = np.cumsum(whole.tokens, dtype=np.int64)
    total = int(ends[-1]) if len(ends) else 0
    begins = ends - whole.tokens
    cuts = np.union1d(begins, np.arange(0, total, row_length))
    of = np.searchsorted(begins, cuts, side="right") - 1
    cut_ends = np.append(cuts[1:], total)[: len(cuts)]
    supervised_before = _supervised_before(whole, begins, index)
    supervised = supervised_before(cut_ends) - supervised_before(cuts)
    # The first token after a cut has no token to be predicted from.
    continued = cuts > begins[of]
    supervised -= continued & (supervised_before(cuts + 1) > supervised_before(cuts))
    segments = PlannedSegments.without_prefix(whole.sequence[of], cuts - begins[of], cut_ends - begins[of], supervised)
    parts = np.bincount(of, minlength=1)
    drops.split_rows += int((parts > 1).sum())
    drops.split_pieces += int(parts[parts > 1].sum())
    rows = -(-total // row_length)
    return segments, PackingPlan(
        order=np.arange(len(segments)),
        offsets=np.searchsorted(cuts // row_length, np.arange(rows + 1)),
        capacities=np.full(rows, row_length, np.int32),
    )


def _supervised_before(whole: PlannedSegments, begins: np.ndarray, index: Iterable[pa.RecordBatch]):
    """Return a function from positions in the concatenated tokens to the number of supervised tokens before them."""
    starts, stops, first = [], [], 0
    for batch in index:
        runs = batch.column("supervised_runs")
        offsets, values = runs.offsets.to_numpy(), runs.values.to_numpy()
        # The index in `whole` of each sequence of the batch, if it is packed.
        own = np.searchsorted(whole.sequence, first + np.arange(len(batch)))
        packed = whole.sequence[np.minimum(own, len(whole) - 1)] == first + np.arange(len(batch))
        begin = np.repeat(begins[np.minimum(own, len(whole) - 1)], np.diff(offsets))
        of_packed = np.repeat(packed, np.diff(offsets))
        positions = (begin + values[offsets[0] : offsets[-1]])[of_packed]
        starts.append(positions[::2])
        stops.append(positions[1::2])
        first += len(batch)
    start, stop = (np.concatenate(some or [np.empty(0, np.int64)]) for some in (starts, stops))
    before = np.concatenate([[0], np.cumsum(stop - start)])

    def supervised_before(positions: np.ndarray) -> np.ndarray:
        runs = np.searchsorted(start, positions, side="left")
        last = np.maximum(runs - 1, 0)
        if not len(start):
            return np.zeros(len(positions), np.int64)
        # The last run that begins before the position may reach beyond it.
        return before[runs] - np.where(runs > 0, np.maximum(stop[last] - positions, 0), 0)

    return supervised_before
