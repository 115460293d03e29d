"""Repairs: what each changes, that it is noted, and that valid rows aren't changed."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from snaketune.corpus.rows import Malformed
from snaketune.corpus.values.validation import STEPS
from tests.corpus.row_spelling import CHAT, PREFERENCES, compact, read, turns

ALL = tuple(STEPS)


@pytest.mark.parametrize(
    "broken, repair, repaired",
    [
        ("U a|U b|A c", "merge-same-role", "U a\n\nb|A c"),
        ("U a|A b|A c|A d", "merge-same-role", "U a|A b\n\nc\n\nd"),
        ("S a|S b|U c|A d", "merge-same-role", "S a\n\nb|U c|A d"),
        ("U a|A b|U  |A c", "drop-empty-turns", None),
        ("U a|A b|T  |U c|A d", "drop-empty-turns", "U a|A b|U c|A d"),
        ("U a|A b|U c|A ", "drop-empty-turns", None),
        ("A hello|U a|A b", "drop-leading-assistant", "U a|A b"),
        ("S s|A hello|A there|U a|A b", "drop-leading-assistant", "S s|U a|A b"),
        ("U a|A b|U c", "drop-trailing-user", "U a|A b"),
        ("U a|A b|U c|U d", "drop-trailing-user", "U a|A b"),
        ("U a", "drop-trailing-user", None),
        ("A a", "drop-leading-assistant", None),
        ("U a|A b|T c", "drop-trailing-user", None),
    ],
)
def test_each_alone(broken, repair, repaired):
    raw = {"messages": turns(*broken.split("|"))}
    with pytest.raises(Malformed):
        read(raw)
    if repaired is None:
        with pytest.raises(Malformed):
            read(raw, repair=(repair,))
        return
    row = read(raw, repair=(repair,))[1]
    assert (compact(row.messages), row.notes) == (repaired, (f"repaired_{repair.replace('-', '_')}",))
    for other in STEPS:
        if other != repair:
            with pytest.raises(Malformed):
                read(raw, repair=(other,))


def test_all_in_any_order():
    raw = {"messages": turns("S s", "A hello", "U ", "U a", "A ", "U b", "A c", "A ", "A d", "U ", "U e")}
    row = read(raw, repair=ALL)[1]
    assert compact(row.messages) == "S s|U a\n\nb|A c\n\nd"
    assert row == read(raw, repair=ALL[::-1])[1]
    assert row.notes == (
        "repaired_drop_empty_turns",
        "repaired_merge_same_role",
        "repaired_drop_leading_assistant",
        "repaired_drop_trailing_user",
    )


def test_results_of_two_calls_stay_two_turns():
    raw = {"messages": turns("U a", "A call", "T 1", "T 2", "A b")}
    assert read(raw, repair=ALL)[1] == read(raw)[1]


def test_prompts_of_preferences_are_repaired_and_keep_their_end():
    raw = {"prompt": turns("A hi", "U a", "U ", "U b"), "chosen": "x", "rejected": "y"}
    row = read(raw, PREFERENCES, repair=ALL)[1]
    assert (compact(row.prompt), compact(row.chosen), compact(row.rejected)) == ("U a\n\nb", "A x", "A y")
    assert row.notes == ("repaired_drop_empty_turns", "repaired_merge_same_role", "repaired_drop_leading_assistant")


@pytest.mark.parametrize("column", ["chosen", "rejected"])
def test_completions_are_not_repaired(column):
    with pytest.raises(Malformed, match="empty_completion"):
        read({"prompt": "hi", "chosen": "x", "rejected": "y", column: " "}, PREFERENCES, repair=ALL)


def test_valid_rows_are_not_changed():
    assert read({"messages": CHAT}, repair=ALL)[1] == read({"messages": CHAT})[1]


@given(st.lists(st.sampled_from(["S s", "U u", "A a", "T t", "U ", "A ", "S "]), min_size=1, max_size=7))
@settings(deadline=None, max_examples=300)
def test_repaired_rows_are_valid_and_stay_repaired(texts):
    try:
        row = read({"messages": turns(*texts)}, repair=ALL)[1]
    except Malformed:
        return
    assert read({"messages": row.messages})[1].messages == row.messages
    assert row.messages[-1]["role"] == "assistant"
