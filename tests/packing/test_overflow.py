"""Sequences longer than a row are dropped, truncated, split or refused; every sequence and token is accounted for."""

from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from snaketune.engine.packing.conversation_overflow import fit_conversations
from snaketune.engine.packing.pair_overflow import PlannedPairs, fit_pairs, whole_pairs
from snaketune.engine.packing.planned_segments import COLUMNS, PlannedSegments
from snaketune.engine.packing.truncation import DropCounts
from snaketune.errors import SnaketuneError
from snaketune.stages.specs import PlanSpec
from tests.packing.made_index import index, runs_of, supervised_tokens

CHAT = {"length": 30, "supervised_runs": [5, 10, 20, 30], "turn_ends": [4, 10, 14, 30]}
PAIR = {"length": 30, "prompt": 6, "chosen": 10, "supervised_runs": [6, 16, 16, 30], "prompt_hash": 1}


def cut(sequences: list[dict], overflow: str, length: int, **others) -> tuple[PlannedSegments, DropCounts]:
    spec = PlanSpec(kind="sft", lengths=(length,), overflow=overflow, **{"strategy": "best-fit-decreasing"} | others)
    drops = DropCounts()
    table = pa.Table.from_batches([index(sequences[:1]), index(sequences[1:])])
    units = fit_conversations(spec, length, [table.slice(0, 1), table.slice(1)], drops)
    return units.take(np.flatnonzero(units.tokens)).segments, drops


def ranges(segments: PlannedSegments) -> list[tuple[int, int, int]]:
    return list(zip(segments.sequence.tolist(), segments.start.tolist(), segments.stop.tolist()))


def test_sequences_that_fit_are_whole():
    segments, drops = cut([CHAT, CHAT], "drop", 30)
    assert ranges(segments) == [(0, 0, 30), (1, 0, 30)]
    assert segments.supervised.tolist() == [15, 15]
    assert drops == DropCounts()


def test_drop_counts_rows_and_tokens():
    segments, drops = cut([CHAT, CHAT | {"length": 12, "supervised_runs": [5, 12]}], "drop", 20)
    assert ranges(segments) == [(1, 0, 12)]
    assert drops.dropped_rows == {"longer_than_row": 1}
    assert drops.dropped_tokens == {"longer_than_row": 30}


def test_truncate_cuts_after_a_turn_if_something_before_is_supervised():
    for length, stop, tokens in ((29, 10, 5), (20, 10, 5), (12, 10, 5), (9, 9, 4), (6, 6, 1)):
        segments, drops = cut([CHAT], "truncate", length)
        assert ranges(segments) == [(0, 0, stop)], length
        assert segments.supervised.tolist() == [tokens]
        assert (drops.truncated_rows, drops.truncated_tokens) == (1, 30 - stop)
    segments, drops = cut([CHAT], "truncate", 5)
    assert not len(segments)
    assert drops.dropped_rows == {"nothing_supervised_in_a_row": 1}


def test_split_cuts_after_turns_and_the_first_token_of_a_part_has_no_label():
    # A question stays with its answer.
    segments, drops = cut([CHAT], "split", 20)
    assert ranges(segments) == [(0, 0, 10), (0, 10, 30)]
    assert segments.supervised.tolist() == [5, 10]
    assert (drops.split_rows, drops.split_pieces) == (1, 2)
    # No turn ends within the second part, so it is cut inside a supervised run.
    segments, drops = cut([CHAT], "split", 10)
    assert ranges(segments) == [(0, 0, 10), (0, 14, 24), (0, 24, 30)]
    assert segments.supervised.tolist() == [5, 4, 5]
    assert drops.dropped_rows == {"nothing_supervised_in_a_piece": 0}
    assert drops.dropped_tokens == {"nothing_supervised_in_a_piece": 4}


def test_raise_names_the_sequence_and_its_length():
    with pytest.raises(SnaketuneError, match=r"conversation abc has 30 tokens, packing\.length is 16"):
        cut([CHAT | {"id": "abc"}], "raise", 16)


def cut_pairs(sequences: list[dict], overflow: str, length: int) -> tuple[PlannedPairs, DropCounts]:
    spec = PlanSpec(kind="preference", lengths=(length,), overflow=overflow, strategy="best-fit-decreasing")
    table, drops = pa.Table.from_batches([index(sequences[:1]), index(sequences[1:])]), DropCounts()
    runs = runs_of(table)
    whole = whole_pairs("preference", table, SimpleNamespace(runs=runs))
    return fit_pairs(spec, length, table, whole, runs, drops), drops


def columns(pairs: PlannedPairs) -> list[tuple[int, ...]]:
    """Return the sequence of each pair, and the tokens of its prompt and completions and those in common."""
    return list(zip(*(getattr(pairs, name).tolist() for name in ("sequence", "prompt", "first", "second", "common"))))


def test_truncated_pairs_have_their_whole_prompt_and_share_the_rest_of_a_row():
    for length, chosen, rejected in ((30, 10, 14), (28, 10, 12), (20, 7, 7), (10, 2, 2), (8, 1, 1)):
        pairs, drops = cut_pairs([PAIR], "truncate", length)
        assert columns(pairs) == [(0, 6, chosen, rejected, 0)], length
        assert pairs.second_start[0] == 16
        assert drops.truncated_tokens == 24 - chosen - rejected
    for length in (7, 6, 3):
        pairs, drops = cut_pairs([PAIR], "truncate", length)
        assert not len(pairs)
        assert drops.dropped_rows == {"prompt_fills_row": 1}
        assert drops.dropped_tokens == {"prompt_fills_row": 30}


def test_common_tokens_of_completions_count_once():
    pair = PAIR | {"common": 4}
    pairs, drops = cut_pairs([pair], "raise", 26)
    assert (columns(pairs), drops) == ([(0, 6, 10, 14, 4)], DropCounts())
    # The rest of a row goes to the tokens that they don't share.
    for length, chosen, rejected in ((24, 10, 12), (16, 7, 7), (12, 5, 5), (11, 4, 5)):
        pairs, drops = cut_pairs([pair], "truncate", length)
        assert columns(pairs) == [(0, 6, chosen, rejected, 4)], length
        assert (pairs.tokens[0], drops.truncated_tokens) == (length, 24 - chosen - rejected)
    # If cut shorter, they would be equal.
    for length in (10, 8, 6):
        pairs, drops = cut_pairs([pair, PAIR], "truncate", length)
        assert drops.dropped_rows["equal_completions_in_a_row"] == 1 or length == 6
        assert 0 not in pairs.sequence


def test_pairs_of_equal_completions_are_dropped():
    """In tokens up to the last supervised one; the tokens after it count as such."""
    equal = PAIR | {"length": 27, "common": 10, "supervised_runs": [6, 15, 16, 25]}
    almost = equal | {"common": 8}
    for overflow in ("drop", "truncate", "raise"):
        pairs, drops = cut_pairs([equal, PAIR, almost], overflow, 30)
        assert pairs.sequence.tolist() == [1, 2]
        assert drops.dropped_rows == {"equal_completions": 1, "after_last_supervised": 0}
        assert drops.dropped_tokens == {"equal_completions": 24, "after_last_supervised": 6}


def test_overflow_of_pairs_drops_them_or_names_the_first():
    pairs, drops = cut_pairs([PAIR, PAIR | {"common": 10, "id": "b"}], "drop", 20)
    assert columns(pairs) == [(1, 6, 10, 14, 10)]
    assert (drops.dropped_rows, drops.dropped_tokens) == ({"longer_than_row": 1}, {"longer_than_row": 30})
    with pytest.raises(SnaketuneError, match=r"pair b has 20 tokens, packing\.length is 19"):
        cut_pairs([PAIR | {"common": 10, "id": "b"}], "raise", 19)


def test_sequences_without_supervised_tokens_are_dropped():
    segments, drops = cut([CHAT | {"supervised_runs": []}, CHAT], "drop", 30)
    assert ranges(segments) == [(1, 0, 30)]
    assert drops.dropped_rows == {"nothing_supervised": 1}
    one_sided = [PAIR | {"supervised_runs": runs} for runs in ([6, 16], [16, 30], [])]
    pairs, drops = cut_pairs([*one_sided, PAIR], "drop", 30)
    assert pairs.sequence.tolist() == [3]
    assert drops.dropped_rows == {"nothing_supervised": 3}


def test_raw_rows_with_text_like_a_control_token_are_dropped():
    segments, drops = cut([CHAT | {"control_text": True}, CHAT], "drop", 30, strategy="none")
    assert ranges(segments) == [(1, 0, 30)]
    assert drops.dropped_rows == {"control_token_in_text": 1}


@st.composite
def conversations(draw) -> dict:
    edges = sorted(draw(st.sets(st.integers(1, 60), min_size=2, max_size=9)))
    runs = edges[: len(edges) // 2 * 2]
    ends = sorted(draw(st.sets(st.integers(1, 60), max_size=5)))
    return {"length": 60, "supervised_runs": runs, "turn_ends": ends}


@given(
    st.lists(conversations(), min_size=1, max_size=5),
    st.sampled_from(["drop", "truncate", "split"]),
    st.integers(8, 64),
)
def test_every_token_is_accounted_for(sequences, overflow, length):
    segments, drops = cut(sequences, overflow, length)
    assert (segments.tokens <= length).all()
    assert (segments.tokens > 0).all()
    packed = int(segments.tokens.sum())
    assert 60 * len(sequences) == packed + drops.dropped_tokens.total() + drops.truncated_tokens
    assert len(sequences) == len(set(segments.sequence.tolist())) + drops.dropped_rows.total()
    assert (np.diff(segments.sequence) >= 0).all()
    for sequence, start, stop, supervised in zip(
        segments.sequence, segments.start, segments.stop, segments.supervised, strict=True
    ):
        runs = sequences[sequence]["supervised_runs"]
        tokens = [t for a, b in zip(runs[::2], runs[1::2]) for t in range(a, b) if start < t < stop]
        assert supervised == len(tokens) > 0


def test_the_columns_are_the_fields():
    assert supervised_tokens(CHAT) == 15
    assert COLUMNS[:3] == ("sequence", "start", "stop")
