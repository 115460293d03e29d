"""What rows are too short for is told, with a length that is enough, and just enough."""

import json
from functools import partial
from types import SimpleNamespace

import pyarrow as pa
import pytest

from snaketune.config.packing import Packing
from snaketune.packing import row_plan
from snaketune.packing.conversation_overflow import DropCounts
from snaketune.packing.pair_overflow import whole_pairs
from snaketune.packing.truncation import STEP, lost_to_length, warning
from snaketune.stages.specs import PlanSpec
from tests.packing.made_index import index, runs_of


def chat(turns: int, each: int) -> dict:
    """Questions and answers of equal length."""
    ends = [each * (turn + 1) for turn in range(2 * turns)]
    return {"length": ends[-1], "turn_ends": ends, "supervised_runs": ends}


def lost(sequences: list[dict], overflow: str, length: int, kind: str = "sft"):
    """What rows of this length lose, what was read, and the share that rows of another length would lose."""
    spec = PlanSpec(kind=kind, lengths=(length,), overflow=overflow, strategy="best-fit-decreasing")
    table = pa.Table.from_batches([index(sequences[:3]), index(sequences[3:])])
    drops, read = DropCounts(), {"rows": len(sequences), "tokens": sum(row["length"] for row in sequences)}
    runs = whole = None
    if kind == "preference":
        runs = runs_of(table)
        whole = whole_pairs(kind, table, SimpleNamespace(runs=runs))
    fit = partial(row_plan.fit, spec, table, runs, whole)
    fit(length, drops)

    def share_lost(length: int) -> float:
        drops = DropCounts()
        fit(length, drops)
        return (drops.dropped_tokens.total() + drops.truncated_tokens) / read["tokens"]

    return lost_to_length(spec, length, table, drops, read, fit), read, share_lost


@pytest.mark.parametrize("overflow", ["drop", "truncate"])
@pytest.mark.parametrize(("longest", "each"), [(40, 25), (11, 100), (7, 333)])
def test_the_length_that_is_advised_keeps_99_percent_and_none_shorter_does(overflow, longest, each):
    sequences = [chat(turns, each) for turns in range(1, longest + 1) for _ in range(20)]
    found, read, share_lost = lost(sequences, overflow, 256)
    assert found.tokens > 0.02 * read["tokens"]
    assert found.enough % STEP == 0
    assert share_lost(found.enough) <= 0.01 < share_lost(found.enough - STEP)
    said = warning("train", "conversations", 256, overflow, found.as_json(), read)
    assert f"packing.length {found.enough}" in said and f"{found.tokens / read['tokens']:.1%}" in said


def test_pairs_are_advised_too():
    pairs = [
        {"length": n, "prompt": 10, "chosen": n // 2, "supervised_runs": [10, n], "prompt_hash": n}
        for n in range(100, 900)
    ]
    found, _, share_lost = lost(pairs, "drop", 256, kind="preference")
    assert share_lost(found.enough) <= 0.01 < share_lost(found.enough - STEP)


def test_two_percent_are_no_warning_and_more_are():
    short = [chat(1, 50)] * 98
    for more, warned in (([chat(1, 150)] * 2, False), ([chat(1, 150)] * 3, True)):
        found, read, *_ = lost(short + more, "truncate", 200)
        assert bool(warning("train", "conversations", 200, "truncate", found.as_json(), read)) is warned
        assert (found.enough is not None) is warned


def test_what_was_never_supervised_or_is_only_split_isnt_lost_to_the_length():
    unsupervised = {"length": 90, "turn_ends": [90], "supervised_runs": []}
    found, *_ = lost([chat(1, 50)] * 3 + [unsupervised] * 3, "truncate", 120)
    assert (found.rows, found.tokens) == (0, 0)
    found, *_ = lost([chat(20, 50)] * 3, "split", 120)
    assert (found.rows, found.tokens) == (0, 0)


def test_auto_is_truncate_for_conversations_drop_for_pairs_and_split_for_documents():
    meant = {kind: Packing().overflow_of(kind) for kind in ("conversations", "preferences", "text")}
    assert meant == {"conversations": "truncate", "preferences": "drop", "text": "split"}
    assert Packing(strategy="none").overflow_of("conversations") == "drop"
    assert Packing(overflow="raise").overflow_of("text") == "raise"


def test_lost_is_plain_json():
    found, *_ = lost([chat(20, 50)] * 3, "drop", 120)
    assert json.loads(json.dumps(found.as_json())) == {"rows": 3, "tokens": 6000, "enough": 2048}
