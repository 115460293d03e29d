"""Trees of messages: the best path, ranked pairs, and the result for each message of a flat file."""

import random

import pytest

from snaketune.corpus.rows import Conversation, Dropped, Malformed, Preference
from tests.corpus.row_spelling import BOTH, CONVERSATIONS, PREFERENCES, compact, read, read_all, reasons


def message(id_, parent, text, rank=None, **flags):
    role = {"q": "prompter", "a": "assistant"}[text[0]]
    return {"message_id": id_, "parent_id": parent, "role": role, "text": text, "rank": rank, "lang": "en", **flags}


#   q1 ── a2 (rank 1)
#      ├─ a3 (rank 0) ── q5 (unanswered)
#      │              └─ q6 ── a7 (rank 1) ── q10
#      │                    └─ a8 (rank 0)
#      └─ a4 (no rank) ── q9
TREE = [
    message("1", None, "q1"),
    message("2", "1", "a2", 1),
    message("3", "1", "a3", 0),
    message("4", "1", "a4"),
    message("5", "3", "q5"),
    message("6", "3", "q6"),
    message("7", "6", "a7", 1),
    message("8", "6", "a8", 0),
    message("9", "4", "q9"),
    message("10", "7", "q10"),
]
PAIRS = {("U q1", "A a3", "A a2"), ("U q1|A a3|U q6", "A a8", "A a7")}


def nested(rows, id_=None):
    """The replies to a message, each with its own."""
    return [row | {"replies": nested(rows, row["message_id"])} for row in rows if row["parent_id"] == id_]


def pairs(made):
    rows = [m.row for m in made if isinstance(m.row, Preference)]
    found = {(compact(row.prompt), compact(row.chosen), compact(row.rejected)) for row in rows}
    assert len(found) == len(rows)
    return found


@pytest.mark.parametrize("seed", [None, *range(5)])
def test_the_best_path_of_a_flat_tree_in_any_order(seed):
    rows = TREE if seed is None else random.Random(seed).sample(TREE, len(TREE))
    made = read_all(rows)
    assert [m.raw.value for m in made] == rows
    by_id = {m.raw.value["message_id"]: m.row for m in made}
    assert compact(by_id["1"].messages) == "U q1|A a3|U q6|A a8"
    assert {id_ for id_, row in by_id.items() if row is None} == {"3", "6", "8"}
    assert {row.reason for row in by_id.values() if isinstance(row, Dropped)} == {"other_branch"}


@pytest.mark.parametrize("seed", [None, *range(5)])
def test_ranked_pairs_of_a_flat_tree_in_any_order(seed):
    rows = TREE if seed is None else random.Random(seed).sample(TREE, len(TREE))
    made = read_all(rows, PREFERENCES)
    assert pairs(made) == PAIRS
    by_id = {m.raw.value["message_id"]: m.row for m in made}
    assert {id_ for id_, row in by_id.items() if isinstance(row, Preference)} == {"2", "7"}
    assert {id_ for id_, row in by_id.items() if row is None} == {"1", "3", "6", "8"}
    assert {row.reason for row in by_id.values() if isinstance(row, Dropped)} == {"unpaired"}


@pytest.mark.parametrize("wrapped", [False, True])
def test_nested_trees(wrapped):
    (root,) = nested(TREE)
    raw = {"message_tree_id": "1", "tree_state": "ready", "prompt": root} if wrapped else root
    layout, row = read(raw)
    assert (layout, compact(row.messages)) == ("message-tree", "U q1|A a3|U q6|A a8")
    made = read_all([raw], PREFERENCES)
    assert pairs(made) == PAIRS and {m.raw.number for m in made} == {1}


def test_the_best_is_paired_with_each_that_ranks_below():
    rows = [
        message(1, None, "q1"),
        *(message(i, 1, f"a{i}", rank) for i, rank in ((2, 2), (3, 0), (4, 1), (5, 0), (6, 2.0))),
    ]
    assert pairs(read_all(rows, PREFERENCES)) == {("U q1", "A a3", f"A a{i}") for i in (2, 4, 6)}
    assert reasons(read_all(rows, PREFERENCES)) == ["part", "row", "part", "row", "unpaired", "row"]


def test_a_rejected_reply_may_have_replies():
    rows = [
        message(1, None, "q1"),
        message(2, 1, "a2", 0),
        message(3, 1, "a3", 1),
        message(4, 3, "q4"),
        message(5, 4, "a5", 0),
        message(6, 4, "a6", 1),
    ]
    for order in (rows, rows[::-1]):
        made = read_all(order, PREFERENCES)
        assert pairs(made) == {("U q1", "A a2", "A a3"), ("U q1|A a3|U q4", "A a5", "A a6")}
        assert sorted(reasons(made)) == ["part"] * 4 + ["row"] * 2


def test_deleted_messages_are_dropped_with_their_replies():
    rows = [row | {"deleted": row["message_id"] == "3", "text": row["text"]} for row in TREE]
    rows[2]["text"] = None
    made = read_all(rows)
    assert reasons(made) == ["row", "part", "deleted", "other_branch", *["deleted"] * 4, "other_branch", "deleted"]
    assert compact(made[0].row.messages) == "U q1|A a2"
    assert pairs(read_all(rows, PREFERENCES)) == set()
    (root,) = nested(rows)
    assert compact(read(root)[1].messages) == "U q1|A a2"


@pytest.mark.parametrize("deleted", [1, "1", "t", "True", 1.0])
def test_a_table_of_messages(deleted):
    """As a database writes it to CSV: no nulls, and flags as it spells them."""
    rows = [row | {key: "" if row[key] is None else str(row[key]) for key in ("parent_id", "rank")} for row in TREE]
    assert pairs(read_all([row | {"deleted": "f"} for row in rows], PREFERENCES)) == PAIRS
    assert pairs(read_all([row | {"deleted": float("nan"), "synthetic": "NaN"} for row in rows], PREFERENCES)) == PAIRS
    made = read_all([row | {"deleted": deleted if row["message_id"] == "3" else 0} for row in rows])
    assert compact(made[0].row.messages) == "U q1|A a2"


def test_a_flag_or_rank_that_is_none_is_malformed():
    for wrong in ({"deleted": "2026-11-28"}, {"synthetic": 2}, {"rank": "first"}, {"rank": [1]}):
        assert reasons(read_all([TREE[0], TREE[1] | wrong]))[1] == "wrong_type"


@pytest.mark.parametrize("kind", BOTH)
def test_a_deleted_root_drops_its_tree(kind):
    rows = [TREE[0] | {"deleted": True}, *TREE[1:]]
    assert reasons(read_all(rows, kind)) == ["deleted"] * len(TREE)
    assert reasons(read_all(nested(rows), kind)) == ["deleted"]


def test_a_tree_without_an_answer_or_a_ranking():
    unanswered = [message(1, None, "q1"), message(2, 1, "a2"), message(3, None, "q3")]
    assert reasons(read_all(unanswered)) == ["row", "part", "unanswered"]
    assert reasons(read_all(unanswered, PREFERENCES)) == ["unpaired"] * 3
    assert reasons(read_all(nested(unanswered))) == ["row", "unanswered"]
    assert reasons(read_all(nested(unanswered), PREFERENCES)) == ["unpaired"] * 2


def test_synthetic_messages_are_noted():
    rows = [TREE[0] | {"synthetic": True}, *TREE[1:]]
    assert read_all(rows)[0].row.notes == read(nested(rows)[0])[1].notes == ("synthetic_message",)


def test_labels_are_copied():
    rows = [TREE[0] | {"task": "t"}, *TREE[1:3]]
    assert read_all(rows)[0].row.task == "t"


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize(
    "rows, expected",
    [
        ([message(1, 9, "a1")], ["orphan_node"]),
        ([message(1, 9, "a1"), message(2, 1, "q2"), message(3, 2, "a3")], ["orphan_node"] * 3),
        ([message(1, 1, "q1")], ["cyclic_tree"]),
        ([message(1, 2, "q1"), message(2, 1, "a2"), message(3, 2, "q3")], ["cyclic_tree"] * 3),
        ([message(1, 3, "q1"), message(2, 1, "a2"), message(3, 2, "q3")], ["cyclic_tree"] * 3),
        ([message(1, None, "q1") | {"text": 3}, message(2, 1, "a2")], ["non_string_content", "orphan_node"]),
        ([message(1, None, "q1") | {"role": "narrator"}], ["unknown_role"]),
        ([message(1, None, "q1") | {"role": None}], ["missing_column"]),
        ([message(1, None, "q1") | {"role": ["prompter"]}], ["unknown_role"]),
        ([message([1], None, "q1")], ["wrong_type"]),
        ([message(1, [2], "q1")], ["wrong_type"]),
        ([message(None, None, "q1")], ["missing_column"]),
        ([message(1, None, "q1", "first")], ["wrong_type"]),
        ([message(1, None, "q1", True)], ["wrong_type"]),
    ],
)
def test_messages_outside_of_trees(kind, rows, expected):
    assert reasons(read_all(rows, kind, layout="message-tree")) == expected


def test_an_id_twice():
    made = read_all([message(1, None, "q1"), message(2, 1, "a2"), message(1, 2, "q3")])
    assert reasons(made) == ["row", "part", "duplicate_message_id"]


def test_a_rank_that_is_no_number_counts_as_none():
    assert reasons(read_all([message(1, None, "q1", float("nan")), message(2, 1, "a2", float("nan"))])) == [
        "row",
        "part",
    ]


@pytest.mark.parametrize(
    "replies, reason",
    [
        (3, "wrong_type"),
        ([3], "wrong_type"),
        ([{"text": "x"}], "missing_speaker"),
        ([{"role": "x", "text": "y"}], "unknown_role"),
    ],
)
def test_invalid_replies(replies, reason):
    with pytest.raises(Malformed, match=reason):
        read({"prompt": {"role": "prompter", "text": "q", "replies": replies}})


@pytest.mark.parametrize("kind", BOTH)
def test_deep_and_wide_trees_take_no_time(kind):
    rows = [message(0, None, "q0"), *(message(i, i - 1, "aq"[i % 2 == 0] + str(i), 0) for i in range(1, 20_000))]
    made = read_all(rows, kind)
    if kind == CONVERSATIONS:
        assert isinstance(made[0].row, Conversation) and len(made[0].row.messages) == 20_000
    wide = read_all([message(0, None, "q0"), *(message(i, 0, f"a{i}", i) for i in range(1, 5000))], kind)
    assert reasons(wide).count("row") == (1 if kind == CONVERSATIONS else 4998)


def test_a_tree_that_begins_with_the_assistant():
    with pytest.raises(Malformed, match="turn_out_of_order"):
        read(message(1, None, "a1"))
