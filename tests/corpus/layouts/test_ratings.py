"""Pairs whose ratings contradict them, rows marked as bad, and the conditions that drop them."""

import pytest

from snaketune.corpus.rows import Dropped, Malformed
from snaketune.errors import SnaketuneError
from tests.corpus.row_spelling import PREFERENCES, read, read_all, turns

PAIR = {"prompt": "q", "chosen": "x", "rejected": "y"}
NAMES = [
    ("chosen-rating", "rejected-rating"),
    ("chosen_rating", "rejected_rating"),
    ("score_chosen", "score_rejected"),
    ("chosen_score", "rejected_score"),
    ("chosen_avg_rating", "rejected_avg_rating"),
    ("chosen_reward", "rejected_reward"),
]


@pytest.mark.parametrize(("better", "worse"), NAMES)
@pytest.mark.parametrize("whole", [False, True])
def test_ratings_agree_with_what_was_chosen(better, worse, whole):
    pair = PAIR | ({"chosen": turns("U q", "A x"), "rejected": turns("U q", "A y")} if whole else {})
    for high, low in ((4, 2), (4.5, "3"), (0.1, -0.1), (3, None)):
        assert read(pair | {better: high, worse: low}, PREFERENCES)[1].chosen[-1]["content"] == "x"
    with pytest.raises(Malformed, match=f"rating_contradicts: {better} is 2, {worse} is 4: the rejected completion"):
        read(pair | {better: 2, worse: 4}, PREFERENCES)
    for low, high in ((3, 3), (3, "3.0")):
        with pytest.raises(Dropped, match="tie"):
            read(pair | {better: high, worse: low}, PREFERENCES)


def test_a_tie_is_dropped_whatever_its_texts():
    for status in ("tie", "Tie "):
        with pytest.raises(Dropped, match="tie"):
            read(PAIR | {"status": status}, PREFERENCES)
    assert read(PAIR | {"status": "swapped"}, PREFERENCES)


def test_of_several_ratings_one_that_agrees_is_enough():
    several = {
        "chosen_overall_score": 8,
        "rejected_overall_score": 6,
        "chosen_honesty_rating": 4,
        "rejected_honesty_rating": 5,
    }
    assert read(PAIR | several, PREFERENCES)
    assert read(PAIR | several | {"chosen_safety_score": 1, "rejected_safety_score": 1}, PREFERENCES)
    with pytest.raises(Malformed, match="rating_contradicts"):
        read(PAIR | several | {"chosen_overall_score": 5}, PREFERENCES)
    assert read(PAIR | {"chosen_score": -1, "rejected_score": -1}, PREFERENCES)
    assert read(
        PAIR | {"chosen_toxicity_score": 0.1, "rejected_toxicity_score": 0.9, "chosen_score_rank": 1}, PREFERENCES
    )
    assert read(PAIR | {"chosen_score": 10**400, "rejected_score": 3}, PREFERENCES)


def test_ratings_that_are_words_are_reported():
    (made,) = read_all([PAIR | {"chosen_rating": "good", "rejected_rating": "good"}], PREFERENCES)
    assert made.ignored == ("chosen_rating", "rejected_rating")


def test_columns_that_count_something_are_no_ratings():
    assert read(PAIR | {"chosen_tokens": 3, "rejected_tokens": 9, "chosen_rating": 1, "num_ratings": 2}, PREFERENCES)


ROWS = [
    {"prompt": f"q{i}", "response": "r", "is_correct": i % 2 == 0, "helpfulness": i % 3,
     "Is_Safe": "False" if i == 1 else "True", "toxic": i == 5, "id": 0}
    for i in range(6)
]  # fmt: skip
MARKS = ["is_correct", "Is_Safe", "toxic"]


def test_marked_rows_are_logged_with_the_condition_that_drops_them(make, capsys):
    (source,) = make(ROWS, source={"ignore": MARKS}).counts["sources"]
    assert source["marked"] == {"is_correct: false": 3, "helpfulness: 0": 2, "Is_Safe: False": 1, "toxic: true": 1}
    output = capsys.readouterr().out
    assert "used although a column marks them as bad: is_correct: false (3 rows), helpfulness: 0 (2 rows)" in output
    assert "for instance `where: is_correct != false`" in output


def test_marked_documents_are_counted_once_however_many_parts_they_have(make):
    rows = [{"text": " ".join(map(str, range(i, 100_000 * i + 1))), "is_correct": i == 2} for i in range(3)]
    counts = make(rows, kind="text", held_out=0, source={"ignore": ["is_correct"]}).counts
    assert counts["sources"][0]["marked"] == {"is_correct: false": 2}
    assert counts["kept"]["train"] > 3


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("is_correct == true", "024"),
        ("is_correct != false", "024"),
        (["is_correct == true", "helpfulness >= 1"], "24"),
        ("helpfulness > 1", "25"),
        ("helpfulness<2", "0134"),
        ("helpfulness <= 0.5", "03"),
        ('Is_Safe == true', "02345"),
        ("prompt == q3", "3"),
        ('prompt != "q3"', "01245"),
        ("note != null", "1"),
        ("note == null", "02345"),
        ("note != z", "02345"),
        ("prompt > q3", "45"),
        ("is_correct != False", "024"),
        ("is_correct == 1", "024"),
        ("prompt != 'q3'", "01245"),
    ],
)  # fmt: skip
def test_only_rows_that_meet_all_conditions_are_used(make, where, expected):
    rows = [row | {"note": "z" if row["prompt"] == "q1" else None} for row in ROWS]
    built = make(rows, source={"where": where, "ignore": [*MARKS, "note"]})
    assert built.prompts() == [f"q{i}" for i in expected]
    assert sum(n for reason, n in built.counts["dropped"].items() if reason.startswith("where ")) == 6 - len(expected)


def test_conditions_apply_to_csv_and_documents(make):
    content = b"prompt,response,ok,score\nq0,r,True,3.5\nq1,r,false,2\nq2,r,true,1\n"
    assert make(content, suffix=".csv", source={"where": ["ok == true", "score > 2"]}).prompts() == ["q0"]
    rows = [{"text": "a", "quality": 1}, {"text": "b", "quality": 3}]
    assert make(rows, kind="text", source={"where": "quality >= 2"}).prompts() == ["b"]


def test_an_unusable_condition_is_refused(make):
    with pytest.raises(
        SnaketuneError, match=r"data/0.jsonl: no row has the column 'is_corect' of `where: is_corect == true`"
    ):
        make(ROWS, source={"where": "is_corect == true", "ignore": MARKS})
    rows = [*ROWS, *({**row, "helpfulness": "much"} for row in ROWS)]
    built = make(rows, source={"where": "helpfulness > 1", "ignore": MARKS}, max_quarantined_fraction=1.0)
    assert {record["reason"] for record in built.quarantine} == {"wrong_type"}
    assert "helpfulness holds" in built.quarantine[0]["detail"]


@pytest.mark.parametrize(
    ("where", "says"),
    [
        ("is_correct", "is not a condition"),
        ("a = 1", "is not a condition"),
        ("a > true", "has no order"),
        ("a == [1]", "a list"),
        ("a == b and c == d", "more than one condition"),
        ("a != false or b", "more than one condition"),
    ],
)
def test_invalid_conditions_are_refused_by_the_config(where, says):
    from pydantic import ValidationError

    from snaketune.config.corpus_sources import Source

    with pytest.raises(ValidationError, match=says):
        Source(files=["x"], where=where)
