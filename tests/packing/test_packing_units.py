"""Units are packed into rows with their segments renumbered; and wrapped rows are full."""

from itertools import pairwise

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from snaketune.engine.packing.best_fit import PackingPlan
from snaketune.engine.packing.conversation_overflow import wrap
from snaketune.engine.packing.packed_units import Units, pack_units
from snaketune.engine.packing.planned_segments import COLUMNS, PlannedSegments
from snaketune.engine.packing.truncation import DropCounts
from tests.packing.made_index import index, runs_of, supervised_tokens


def whole(sequences: list[dict]) -> PlannedSegments:
    """Return one segment per sequence, uncut."""
    rows = [(number, 0, row["length"], supervised_tokens(row)) for number, row in enumerate(sequences)]
    return PlannedSegments.without_prefix(*np.array(rows, np.int32).reshape(-1, 4).T)


def plan(*rows: list[int]) -> PackingPlan:
    """Return a plan of rows of 20 tokens, given by their units."""
    offsets = np.cumsum([0, *map(len, rows)])
    return PackingPlan(order=np.concatenate(rows), offsets=offsets, capacities=np.full(len(rows), 20, np.int32))


def segments(*rows: tuple[int, ...]) -> PlannedSegments:
    return PlannedSegments(**dict(zip(COLUMNS, np.array(rows, np.int32).T, strict=True)))


def test_trees_are_numbered_within_their_row():
    # Two pairs of one prompt, a pair of equal completions, and an ordinary pair.
    units = Units(
        segments=segments(
            (0, 0, 5, 0, 0, 2), (0, 5, 8, 3, 0, 3), (1, 5, 6, 4, 1, 1),
            (2, 0, 4, 0, 0, 1),
            (3, 0, 6, 0, 0, 2), (3, 6, 8, 2, 0, 2),
        ),
        offsets=np.array([0, 3, 4, 6]),
        pairs=np.array([[0, 0, 1], [1, 2, 1], [2, 0, 0], [3, 0, 1]], np.int32),
        pair_offsets=np.array([0, 2, 3, 4]),
    )  # fmt: skip
    assert (units.tokens.tolist(), units.supervised.tolist()) == ([9, 4, 8], [6, 1, 4])
    rows = pack_units(units, plan([2, 0], [1]))
    assert rows.segments.sequence.tolist() == [3, 3, 0, 0, 1, 2]
    assert rows.segments.prefix_segment.tolist() == [0, 0, 2, 2, 3, 0]
    assert rows.pairs.tolist() == [[3, 0, 1], [0, 2, 3], [1, 4, 3], [2, 0, 0]]
    assert (rows.offsets.tolist(), rows.pair_offsets.tolist()) == ([0, 5, 6], [0, 3, 4])
    # A segment that two pairs end with counts for the first of them.
    assert rows.by_pair(rows.segments.tokens).tolist() == [8, 8, 1, 4]
    assert (rows.rows, rows.documents) == (2, 4)


def test_single_segments_are_units():
    sequences = [{"length": 10, "supervised_runs": [4, 9]}, {"length": 6, "supervised_runs": [1, 2]}]
    units = Units(segments=whole(sequences), offsets=np.arange(3))
    assert (units.tokens.tolist(), units.supervised.tolist()) == ([10, 6], [5, 1])
    rows = pack_units(units, plan([1], [0]))
    assert (rows.segments.sequence.tolist(), rows.offsets.tolist(), rows.documents) == ([1, 0], [0, 1, 2], 2)


@given(st.lists(st.integers(1, 30), max_size=12), st.integers(8, 20))
def test_wrapped_rows_are_full_and_lose_nothing_but_labels_at_cuts(lengths, row_length):
    sequences = [{"length": n, "supervised_runs": [1, n] if n > 1 else []} for n in lengths]
    drops = DropCounts()
    runs = runs_of(pa.Table.from_batches([index(sequences)]))
    segments, offsets = wrap(whole(sequences), runs, row_length, drops)
    assert segments.tokens.sum() == sum(lengths)
    per_row = [int(segments.tokens[a:b].sum()) for a, b in pairwise(offsets)]
    assert per_row[:-1] == [row_length] * (len(per_row) - 1)
    assert len(segments) >= len(lengths)
    for start, stop, supervised in zip(segments.start, segments.stop, segments.supervised, strict=True):
        # All tokens but the first of a sequence are supervised here, and the first of a segment never is.
        assert supervised == stop - start - 1
    assert drops.split_pieces - drops.split_rows == len(segments) - len(lengths)
