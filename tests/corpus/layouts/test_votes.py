"""Preferences from votes on two answers, and from completions labelled one by one."""

import pytest

from snaketune.corpus.rows import Dropped, Malformed
from tests.corpus.row_spelling import PREFERENCES, compact, read, read_all, reasons, turns


def judged(**votes):
    return {"instruction": "Add", "input": "1, 2", "response1": "3", "response2": "12", **votes}


def annotated(*votes):
    return judged(**{f"annotator{i}": vote for i, vote in enumerate(votes, start=1)})


@pytest.mark.parametrize(
    "votes, chosen",
    [
        ((1, 1, 1), "3"),
        ((2, 1, 2), "12"),
        ((1, 0, 1), "3"),
        ((2,), "12"),
        ((2, None, 2), "12"),
        ((1, 1, 2, 0, 1), "3"),
        (("1", "2", "2"), "12"),
        ((1.0, 2.0, 1.0), "3"),
    ],
)
def test_most_votes_win(votes, chosen):
    layout, row = read(annotated(*votes), PREFERENCES)
    assert layout == "votes" and row.prompt == turns("U Add\n\n1, 2")
    assert (row.chosen, row.rejected) == (turns(f"A {chosen}"), turns(f"A {'12' if chosen == '3' else '3'}"))


@pytest.mark.parametrize("votes", [(0, 0, 0), (1, 2), (0, 1, 2), (1, 0, 0), (1, 1, 2, 2, 0), (0,), ("tie",)])
def test_ties_are_dropped(votes):
    with pytest.raises(Dropped, match="tie"):
        read(annotated(*votes), PREFERENCES)


@pytest.mark.parametrize(
    "vote, first", [(1, True), ("A", True), ("model_a", True), (" b ", False), ("2", False), (2.0, False)]
)
def test_one_verdict(vote, first):
    row = read({"prompt": "hi", "answer_a": "x", "answer_b": "y", "winner": vote}, PREFERENCES)[1]
    assert (row.chosen, row.rejected) == ((turns("A x"), turns("A y")) if first else (turns("A y"), turns("A x")))


@pytest.mark.parametrize("vote", [0, "tie", "Tie", 1.5, "tie (bothbad)", "0"])
def test_one_verdict_that_is_a_tie(vote):
    with pytest.raises(Dropped, match="tie"):
        read({"prompt": "hi", "response_a": "x", "response_b": "y", "winner": vote}, PREFERENCES)


def test_whole_conversations():
    raw = {"conversation_a": turns("U hi", "A x"), "conversation_b": turns("U hi", "A y"), "winner": "model_b"}
    row = read(raw, PREFERENCES)[1]
    assert (row.prompt, row.chosen, row.rejected) == (turns("U hi"), turns("A y"), turns("A x"))


@pytest.mark.parametrize(
    "raw, reason, says",
    [
        (annotated(3), "unknown_vote", "annotator1 holds 3"),
        (annotated(1, "left"), "unknown_vote", "annotator2 holds 'left'"),
        (annotated(True), "unknown_vote", "bool|True"),
        (annotated([1]), "unknown_vote", "list"),
        (annotated(-1), "unknown_vote", "-1"),
        (annotated(float("nan")), "unknown_vote", "nan"),
        (judged(label={"a": 1}), "unknown_vote", "dict"),
        (annotated(None), "unknown_layout", ""),
        (annotated(1) | {"response1": True}, "wrong_type", "chosen holds bool"),
        (annotated(1) | {"response2": ""}, "empty_completion", "rejected"),
        (annotated(1) | {"response2": "3"}, "identical_chosen_and_rejected", ""),
        (annotated(1) | {"instruction": [3]}, "wrong_type", "instruction"),
        ({"response1": "x", "response2": "y", "label": 1}, "missing_column", "prompt"),
    ],
)
def test_invalid_votes(raw, reason, says):
    with pytest.raises(Malformed, match=f"{reason}: .*({says})"):
        read(raw, PREFERENCES)


def test_a_configured_layout_reports_missing_columns():
    with pytest.raises(Malformed, match=r"missing_column: no column response_a, response_b or"):
        read({"prompt": "hi", "response1": "x", "label": 1}, PREFERENCES, layout="votes")


def single(prompt, completion, label):
    return {"prompt": prompt, "completion": completion, "label": label}


def test_labelled_completions_are_paired_by_prompt():
    rows = [
        single("a", "a1", True),
        single("b", "b1", False),
        single("a", "a2", False),
        single("a", "a3", False),
        single("b", "b2", True),
        single("a", "a4", True),
        single("a", "a5", True),
        single("c", "c1", True),
    ]
    made = read_all(rows, PREFERENCES)
    assert [m.raw.number for m in made] == list(range(1, 9)) and {m.layout for m in made} == {"unpaired"}
    assert reasons(made) == ["row", "part", "part", "part", "row", "row", "unpaired", "unpaired"]
    summaries = [
        (compact(m.row.prompt), compact(m.row.chosen), compact(m.row.rejected)) for m in made if reasons([m]) == ["row"]
    ]
    assert summaries == [("U a", "A a1", "A a2"), ("U b", "A b2", "A b1"), ("U a", "A a4", "A a3")]


def test_labelled_completions_as_turns():
    rows = [
        {"prompt": turns("S s", "U hi"), "completion": turns("A x"), "label": True},
        {"prompt": turns("S s", "U hi"), "completion": turns("A y"), "label": False},
    ]
    made = read_all(rows, PREFERENCES)
    assert reasons(made) == ["row", "part"]
    assert compact(made[0].row.prompt) == "S s|U hi" and compact(made[0].row.rejected) == "A y"


@pytest.mark.parametrize(
    "raw, reason",
    [
        (single("a", "x", "greeting"), "wrong_type"),
        (single("a", "x", 2), "wrong_type"),
        (single("a", "x", None), "missing_column"),
        (single(None, "x", True), "missing_column"),
        (single("a", None, True), "missing_column"),
        (single(True, "x", True), "wrong_type"),
        (single("a", False, True), "wrong_type"),
    ],
)
def test_invalid_labelled_completions(raw, reason):
    rows = [single("a", "x", True), raw, single("a", "y", False)]
    assert sorted(reasons(read_all(rows, PREFERENCES, layout="unpaired"))) == sorted(["row", reason, "part"])


def test_the_same_completion_good_and_bad():
    made = read_all([single("a", "x", True), single("a", "x", False)], PREFERENCES)
    assert reasons(made) == ["identical_chosen_and_rejected", "part"]


def test_two_columns_with_different_verdicts_are_refused():
    """One of them is about something else: for instance `label` beside `winner`."""
    raw = {"prompt": "hi", "response_a": "x", "response_b": "y", "winner": "model_a"}
    with pytest.raises(Malformed, match="winner 'model_a', label 2: the verdicts differ"):
        read(raw | {"label": 2}, PREFERENCES)
    assert read(raw | {"label": 1}, PREFERENCES)[1].chosen == turns("A x")
