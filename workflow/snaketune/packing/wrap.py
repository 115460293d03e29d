"""Rows as pre-training makes them: all sequences end to end, cut wherever a row ends.

What is cut goes on as a segment of its own, which sees nothing of what came before the cut.
"""

from collections.abc import Iterable

import numpy as np
import pyarrow as pa

from snaketune.packing.best_fit import PackingPlan
from snaketune.packing.conversation_overflow import Losses, Pieces


def wrap(
    pieces: Pieces, index: Iterable[pa.RecordBatch], row_length: int, losses: Losses
) -> tuple[Pieces, PackingPlan]:
    """Cut whole sequences into rows that are all full but the last.

    Args:
        pieces: the whole sequences, in order.
        index: what `tokenize` wrote of the split, for where they are supervised.
        losses: counts what is cut.
    """
    ends = np.cumsum(pieces.tokens, dtype=np.int64)
    total = int(ends[-1]) if len(ends) else 0
    begins = ends - pieces.tokens
    cuts = np.union1d(begins, np.arange(0, total, row_length))
    of = np.searchsorted(begins, cuts, side="right") - 1
    cut_ends = np.append(cuts[1:], total)[: len(cuts)]
    supervised_before = _supervised_before(pieces, begins, index)
    supervised = supervised_before(cut_ends) - supervised_before(cuts)
    # The first token of what goes on has nothing to be predicted from.
    goes_on = cuts > begins[of]
    supervised -= goes_on & (supervised_before(cuts + 1) > supervised_before(cuts))
    made = Pieces.alone(pieces.sequence[of], cuts - begins[of], cut_ends - begins[of], supervised)
    in_pieces = np.bincount(of, minlength=1)
    losses.split_rows += int((in_pieces > 1).sum())
    losses.split_pieces += int(in_pieces[in_pieces > 1].sum())
    rows = -(-total // row_length)
    return made, PackingPlan(
        order=np.arange(len(made)),
        starts=np.searchsorted(cuts // row_length, np.arange(rows + 1)),
        capacities=np.full(rows, row_length, np.int32),
    )


def _supervised_before(pieces: Pieces, begins: np.ndarray, index: Iterable[pa.RecordBatch]):
    """A function from places among all tokens to the number of supervised tokens before them."""
    starts, stops, first = [], [], 0
    for batch in index:
        runs = batch.column("supervised_runs")
        offsets, values = runs.offsets.to_numpy(), runs.values.to_numpy()
        # Which of the pieces, if any, each sequence of the batch is.
        own = np.searchsorted(pieces.sequence, first + np.arange(len(batch)))
        kept = pieces.sequence[np.minimum(own, len(pieces) - 1)] == first + np.arange(len(batch))
        begin = np.repeat(begins[np.minimum(own, len(pieces) - 1)], np.diff(offsets))
        of_kept = np.repeat(kept, np.diff(offsets))
        places = (begin + values[offsets[0] : offsets[-1]])[of_kept]
        starts.append(places[::2])
        stops.append(places[1::2])
        first += len(batch)
    start, stop = (np.concatenate(some or [np.empty(0, np.int64)]) for some in (starts, stops))
    before = np.concatenate([[0], np.cumsum(stop - start)])

    def supervised_before(places: np.ndarray) -> np.ndarray:
        runs = np.searchsorted(start, places, side="left")
        last = np.maximum(runs - 1, 0)
        if not len(start):
            return np.zeros(len(places), np.int64)
        # The last run that begins before the place may reach over it.
        return before[runs] - np.where(runs > 0, np.maximum(stop[last] - places, 0), 0)

    return supervised_before
