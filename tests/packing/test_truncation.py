"""The warning about tokens lost to the row length advises the shortest length that is enough."""

import json
from types import SimpleNamespace

import pyarrow as pa
import pytest

from snaketune.config.packing import Packing
from snaketune.engine.packing.conversation_overflow import fit_conversations
from snaketune.engine.packing.pair_overflow import fit_pairs, whole_pairs
from snaketune.engine.packing.truncation import STEP, DropCounts, lost_to_length, warning
from snaketune.stages.specs import PlanSpec
from tests.packing.made_index import index, runs_of


def chat(turns: int, each: int) -> dict:
    """Questions and answers of equal length."""
    ends = [each * (turn + 1) for turn in range(2 * turns)]
    return {"length": ends[-1], "turn_ends": ends, "supervised_runs": ends}


def lost(sequences: list[dict], overflow: str, length: int, kind: str = "sft"):
    """Return the loss in rows of this length, what was read, and a function from another length to the share lost."""
    spec = PlanSpec(kind=kind, lengths=(length,), overflow=overflow, strategy="best-fit-decreasing")
    table = pa.Table.from_batches([index(sequences[:3]), index(sequences[3:])])
    drops, read = DropCounts(), {"rows": len(sequences), "tokens": sum(row["length"] for row in sequences)}
    runs = runs_of(table)
    whole = whole_pairs(kind, table, SimpleNamespace(runs=runs)) if kind == "preference" else None

    def fit(length: int, drops: DropCounts) -> None:
        if whole is None:
            fit_conversations(spec, length, [table], drops)
        else:
            fit_pairs(spec, length, table, whole, runs, drops)

    fit(length, drops)

    def share_lost(length: int) -> float:
        drops = DropCounts()
        fit(length, drops)
        return (drops.dropped_tokens.total() + drops.truncated_tokens) / read["tokens"]

    return lost_to_length(spec, length, [table], drops, read, fit), read, share_lost


@pytest.mark.parametrize("overflow", ["drop", "truncate"])
@pytest.mark.parametrize(("longest", "each"), [(40, 25), (11, 100), (7, 333)])
def test_the_advised_length_retains_99_percent_and_no_shorter_one_does(overflow, longest, each):
    sequences = [chat(turns, each) for turns in range(1, longest + 1) for _ in range(20)]
    loss, read, share_lost = lost(sequences, overflow, 256)
    assert loss["tokens"] > 0.02 * read["tokens"]
    assert loss["enough"] % STEP == 0
    assert share_lost(loss["enough"]) <= 0.01 < share_lost(loss["enough"] - STEP)
    message = warning("train", "conversations", 256, overflow, loss, read)
    assert f"packing.length {loss['enough']}" in message and f"{loss['tokens'] / read['tokens']:.1%}" in message


def test_a_length_is_advised_for_pairs_too():
    pairs = [
        {"length": n, "prompt": 10, "chosen": n // 2, "supervised_runs": [10, n], "prompt_hash": n}
        for n in range(100, 900)
    ]
    loss, _, share_lost = lost(pairs, "drop", 256, kind="preference")
    assert share_lost(loss["enough"]) <= 0.01 < share_lost(loss["enough"] - STEP)


def test_more_than_two_percent_are_worth_a_warning():
    short = [chat(1, 50)] * 98
    for more, warned in (([chat(1, 150)] * 2, False), ([chat(1, 150)] * 3, True)):
        loss, read, *_ = lost(short + more, "truncate", 200)
        assert bool(warning("train", "conversations", 200, "truncate", loss, read)) is warned
        assert (loss["enough"] is not None) is warned


def test_unsupervised_and_split_sequences_arent_lost_to_the_length():
    unsupervised = {"length": 90, "turn_ends": [90], "supervised_runs": []}
    loss, *_ = lost([chat(1, 50)] * 3 + [unsupervised] * 3, "truncate", 120)
    assert (loss["rows"], loss["tokens"]) == (0, 0)
    loss, *_ = lost([chat(20, 50)] * 3, "split", 120)
    assert (loss["rows"], loss["tokens"]) == (0, 0)


def test_auto_is_truncate_for_conversations_drop_for_pairs_and_split_for_documents():
    meant = {kind: Packing().overflow_of(kind) for kind in ("conversations", "preferences", "text")}
    assert meant == {"conversations": "truncate", "preferences": "drop", "text": "split"}
    assert Packing(strategy="none").overflow_of("conversations") == "drop"
    assert Packing(overflow="raise").overflow_of("text") == "raise"


def test_lost_is_plain_json():
    loss, *_ = lost([chat(20, 50)] * 3, "drop", 120)
    assert json.loads(json.dumps(loss)) == {"rows": 3, "tokens": 6000, "enough": 2048}
