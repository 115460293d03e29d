"""Verdicts on two answers: the better one is chosen, ties are dropped, others are refused."""

import pytest

from snaketune.config.corpus_sources import Source
from snaketune.corpus.layouts.canonical import canonical_rows
from snaketune.corpus.rows import Dropped, Malformed, RawRow
from tests.corpus.row_spelling import (
    PREFERENCES,
    compact,
    read,
    read_all,
    reasons,
    turns,
)


def compared(verdict, column="label", names=("response_A", "response_B")):
    return {"question": "q", names[0]: "x", names[1]: "y", column: verdict}


@pytest.mark.parametrize(
    "verdict, first",
    [
        ("A>B", True),
        ("A>>B", True),
        ("B>A", False),
        ("B>>A", False),
        ("A<B", False),
        ("A<<B", False),
        (" a > b ", True),
        ("[[A]]", True),
        ("[[B]]", False),
        ("[[A>>B]]", True),
        ("[[B>A]]", False),
        ("assistant_b", False),
    ],
)
def test_verdicts(verdict, first):
    row = read(compared(verdict), PREFERENCES)[1]
    assert (compact(row.chosen), compact(row.rejected)) == (("A x", "A y") if first else ("A y", "A x"))


@pytest.mark.parametrize("verdict", ["A=B", "A==B", "[[A=B]]", "[[C]]", "tie", "both_bad", "Tie (both bad)"])
def test_verdicts_that_are_ties(verdict):
    with pytest.raises(Dropped, match="tie"):
        read(compared(verdict), PREFERENCES)


@pytest.mark.parametrize("verdict", ["A>C", "C", ">", "A>B>A", "B A", "[[A", "A>B?"])
def test_invalid_verdicts(verdict):
    with pytest.raises(Malformed, match="unknown_vote"):
        read(compared(verdict), PREFERENCES)


@pytest.mark.parametrize("column", ["preference_strength", "overall_preference"])
def test_strength_of_a_preference(column):
    for strength in (-3, -1, -0.5, "-2"):
        assert compact(read(compared(strength, column), PREFERENCES)[1].chosen) == "A x"
    for strength in (3, 1, 2.0, "1"):
        _, second = read_all([compared(-1, column), compared(strength, column)], PREFERENCES)
        assert compact(second.row.chosen) == "A y"
    with pytest.raises(Dropped, match="tie"):
        read(compared(0, column), PREFERENCES)
    for strength in ("much", True, float("nan")):
        with pytest.raises(Malformed, match="unknown_vote"):
            read(compared(strength, column), PREFERENCES)


@pytest.mark.parametrize("strengths", [(1, 2, 6, 4, 7), (1, "5"), (2,)])
def test_strengths_that_may_be_a_scale_are_refused(strengths):
    # From 1 for the first answer to 7 for the second.
    with pytest.raises(
        Malformed,
        match=r"ambiguous_votes: overall_preference .*above 0.*verdict: overall_preference.*write A, B",
    ):
        read_all([compared(strength, "overall_preference") for strength in strengths], PREFERENCES)


def test_strengths_that_the_config_names_or_selects_are_taken_as_they_are():
    rows = [compared(strength, "overall_preference") for strength in (1, 3)]
    named = {"prompt": "question", "answers": ["response_A", "response_B"], "verdict": "overall_preference"}
    assert [compact(result.row.chosen) for result in read_all(rows, PREFERENCES, **named)] == ["A y"] * 2
    source = Source(files=["x"], where=["overall_preference >= 1"])
    raws = [
        RawRow("row", number, row) for number, row in enumerate([*rows, compared(-2, "overall_preference")], start=1)
    ]
    made = list(canonical_rows(raws, kind=PREFERENCES, source=source, repair=()))
    assert reasons(made) == ["row", "row", "where overall_preference >= 1"]


@pytest.mark.parametrize("turn", [1, 0, -1])
def test_a_verdict_that_may_be_on_an_earlier_answer_is_malformed(turn):
    first, second = (turns("U q", f"A {text}", "U more", f"A {text}") for text in "xy")
    row = {"conversation_a": first, "conversation_b": second, "winner": "model_b"}
    assert read(row | {"turn": 2}, PREFERENCES)
    with pytest.raises(Malformed, match=rf"turn is {turn} of 2.*where: turn == 2.*`turn` under `ignore`"):
        read(row | {"turn": turn}, PREFERENCES)


def test_answers_that_are_counted_from_zero():
    names = ("response_0", "response_1")
    assert compact(read(compared(0, names=names), PREFERENCES)[1].chosen) == "A x"
    assert compact(read(compared(1, "better_response_id", names), PREFERENCES)[1].chosen) == "A y"
    with pytest.raises(Malformed, match="unknown_vote"):
        read(compared(2, names=names), PREFERENCES)


def test_verdicts_that_may_count_from_zero_are_refused():
    # 0 for the first and 1 for the second, or 0 for a tie and 1 for the first: the file doesn't show which.
    zero_or_one = [compared(0), compared(1), compared(0)]
    with pytest.raises(Malformed, match=r"ambiguous_votes: label .* 0 and 1.*never 2.*write A, B or tie"):
        read_all(zero_or_one, PREFERENCES)
    assert reasons(read_all([*zero_or_one, compared(2)], PREFERENCES)) == ["tie", "row", "tie", "row"]
    assert reasons(read_all([compared(0), compared("A")], PREFERENCES)) == ["tie", "row"]
