"""Pairs that share a prompt are placed together, and wrapped rows are full."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from snaketune.packing.best_fit import plan_best_fit_decreasing
from snaketune.packing.pieces import COLUMNS, Losses, Pieces
from snaketune.packing.units import shared_prompts, singles
from snaketune.packing.wrapped import wrap
from tests.packing.made_index import index


def whole(sequences: list[dict]) -> Pieces:
    """A piece of each, nothing cut."""
    rows = []
    for number, row in enumerate(sequences):
        seam = row.get("prompt", 0) + row.get("chosen", 0)
        second = (seam, row["length"]) if seam else (0, 0)
        supervised = sum(np.subtract(row["supervised_runs"][1::2], row["supervised_runs"][::2]))
        rows.append((number, 0, seam or row["length"], *second, row.get("prompt", 0), supervised))
    return Pieces(**dict(zip(COLUMNS, np.array(rows, np.int32).reshape(-1, len(COLUMNS)).T)))


def pair(prompt_hash: int, prompt: int = 6, length: int = 10) -> dict:
    return {
        "length": length, "prompt": prompt, "chosen": 2, "prompt_hash": prompt_hash, "supervised_runs": [prompt, length],
    }  # fmt: skip


def test_pairs_of_one_prompt_stand_together_with_it_once():
    sequences = [pair(1), pair(2), pair(1), pair(3), pair(1)]
    units = shared_prompts(whole(sequences), iter([index(sequences[:2]), index(sequences[2:])]), row_length=40)
    assert np.diff(units.starts).tolist() == [3, 1, 1]
    assert units.pieces.sequence.tolist() == [0, 2, 4, 1, 3]
    assert units.pieces.start.tolist() == [0, 6, 6, 0, 0]
    assert units.tokens.tolist() == [18, 10, 10]
    assert units.saved == 12


def test_a_group_that_is_longer_than_a_row_is_as_many_as_it_takes():
    sequences = [pair(1) for _ in range(5)]
    units = shared_prompts(whole(sequences), iter([index(sequences)]), row_length=14)
    assert units.tokens.tolist() == [14, 14, 10]
    assert units.pieces.start.tolist() == [0, 6, 0, 6, 0]


def test_a_plan_of_units_becomes_one_of_pieces():
    sequences = [pair(1), pair(2), pair(1), pair(3)]
    units = shared_prompts(whole(sequences), iter([index(sequences)]), row_length=24)
    plan = units.expanded(plan_best_fit_decreasing(units.tokens, [24], units.supervised))
    placed = units.pieces.take(plan.order)
    assert [placed.sequence[a:b].tolist() for a, b in zip(plan.starts, plan.starts[1:])] == [[0, 2, 1], [3]]


def test_single_pieces_are_units():
    pieces = whole([pair(1), pair(1)])
    units = singles(pieces)
    assert (units.tokens.tolist(), units.saved) == ([10, 10], 0)


@given(st.lists(st.integers(1, 30), max_size=12), st.integers(8, 20))
def test_wrapped_rows_are_full_and_lose_nothing_but_labels_at_cuts(lengths, row_length):
    sequences = [{"length": n, "supervised_runs": [1, n] if n > 1 else []} for n in lengths]
    losses = Losses()
    batches = [index(sequences[:3]), index(sequences[3:])]
    pieces, plan = wrap(whole(sequences), iter(batches), row_length, losses)
    assert pieces.tokens.sum() == sum(lengths)
    per_row = [int(pieces.tokens[a:b].sum()) for a, b in zip(plan.starts, plan.starts[1:])]
    assert per_row[:-1] == [row_length] * (len(per_row) - 1)
    assert len(pieces) >= len(lengths)
    for start, stop, supervised in zip(pieces.start, pieces.stop, pieces.supervised, strict=True):
        # All but the first token is supervised here, and a piece's own first never is.
        assert supervised == stop - start - 1
    assert losses.split_pieces - losses.split_rows == len(pieces) - len(lengths)
