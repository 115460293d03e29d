"""Several rated completions of a prompt, and two scored answers, to pairs."""

import pytest

from snaketune.config.corpus_sources import Source
from snaketune.corpus.layouts.canonical import canonical_rows
from snaketune.corpus.rows import RawRow
from tests.corpus.row_spelling import PREFERENCES, compact, read


def pairs(raw, **source):
    """The pairs of one row, `chosen>rejected`, or why there is none."""
    made = canonical_rows([RawRow("row", 1, raw)], kind=PREFERENCES, source=Source(files=["x"], **source), repair=())
    return [
        getattr(one.row, "reason", None) or f"{one.row.chosen[-1]['content']}>{one.row.rejected[-1]['content']}"
        for one in made
    ]


def rated(ratings, key="overall_score", column="completions", text="response"):
    return {"instruction": "q", column: [{text: f"{name}", key: rating} for name, rating in zip("abcdef", ratings)]}


SHAPES = {
    "ultrafeedback": rated([7.5, 9.0, 3.0, "N/A"]) | {"models": ["m"], "source": "z"},
    "nectar": {
        "prompt": "q", "turns": 1, "num_responses": 3,
        "answers": [{"answer": "a", "rank": 2.0}, {"answer": "b", "rank": 1.0}, {"answer": "c", "rank": 3.0}],
    },
    "lists": {"prompt": "q", "generations": ["a", "b", "c"], "ratings": [2, "4", 1], "x": 1},
    "ranks": {"prompt": "q", "responses": ["a", "b", "c"], "ranks": [2, 1, 3]},
    "scores as texts": rated(["2", "3.5", "1"], key="score", column="candidates", text="text"),
}  # fmt: skip


@pytest.mark.parametrize("raw", SHAPES.values(), ids=SHAPES)
def test_the_best_against_each_lower_one_or_against_the_worst(raw):
    assert pairs(raw) == ["b>c", "b>a"]
    assert pairs(raw, pairing="worst") == ["b>c"]
    (made, *_) = canonical_rows([RawRow("row", 1, raw)], kind=PREFERENCES, source=Source(files=["x"]), repair=())
    assert (made.layout, compact(made.row.prompt)) == ("rated", "U q")


def test_equal_ratings_and_those_within_the_margin_make_no_pair():
    assert pairs(rated([3, 3, 1])) == ["a>c"]
    assert pairs(rated([3, 3, 3])) == ["tie"]
    assert pairs(rated([5, 4, 1]), margin=2) == ["a>c", "below_margin"]
    assert pairs(rated([5, 4, 4.5]), margin=2) == ["below_margin", "below_margin"]
    assert pairs(rated([5, None, "none"])) == ["unread_ratings"]
    assert pairs({"prompt": "q", "responses": ["a", "b", "c"], "scores": [1, 2]}) == ["unread_ratings"]


@pytest.mark.parametrize(
    "ranking, made",
    [
        # Ranks, or the numbers of completions from the best to the worst.
        ([2, 0, 1], ["ambiguous_ranking"]),
        ([2, 3, 1], ["ambiguous_ranking"]),
        # The same as either.
        ([1, 0, 2], ["b>c", "b>a"]),
        ([2, 1, 3], ["b>c", "b>a"]),
        ([2, 1, 2], ["b>a", "b>c"]),
    ],
)
def test_a_ranking_that_may_be_an_order_is_malformed(ranking, made):
    raw = {"prompt": "q", "responses": ["a", "b", "c"]}
    assert pairs(raw | {"ranking": ranking}) == made
    assert pairs(raw | {"ranks": ranking}) != ["ambiguous_ranking"]
    fields = {"prompt": "prompt", "answers": ["responses"], "ratings": ["ranking"]}
    assert pairs(raw | {"ranking": ranking}, fields=fields) != ["ambiguous_ranking"]


@pytest.mark.parametrize("rating", ["inf", float("inf"), "-Infinity"])
def test_infinite_ratings_are_malformed(rating):
    assert pairs({"prompt": "q", "responses": ["a", "b"], "scores": [1, rating]}) == ["infinite_number"]
    assert pairs(rated([1, rating])) == ["infinite_number"]
    scored = {"prompt": "q", "chosen": "a", "rejected": "b", "score_chosen": rating, "score_rejected": 1}
    assert pairs(scored) == ["infinite_number"]


def test_a_margin_applies_to_rated_pairs_and_scored_answers():
    pair = {"prompt": "q", "chosen": "a", "rejected": "b", "score_chosen": 4.0}
    assert pairs(pair | {"score_rejected": 3.5}) == ["a>b"]
    assert pairs(pair | {"score_rejected": 3.5}, margin=1) == ["below_margin"]
    assert pairs(pair | {"score_rejected": 3}, margin=1) == ["a>b"]


WEBGPT = {"question": {"full_text": "q", "id": "1"}, "answer_0": "a", "answer_1": "b", "quotes_0": {"title": ["t"]}}
SHP = {"history": "q", "human_ref_A": "a", "human_ref_B": "b", "labels": 1}


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (WEBGPT | {"score_0": 0.5, "score_1": -0.5}, ["a>b"]),
        (WEBGPT | {"score_0": -1, "score_1": 1}, ["b>a"]),
        (WEBGPT | {"score_0": 0.0, "score_1": 0.0}, ["tie"]),
        (SHP | {"score_A": 12, "score_B": 3}, ["a>b"]),
        (SHP | {"score_A": 2, "score_B": 3}, ["b>a"]),
    ],
)
def test_two_answers_with_scores(raw, expected):
    assert pairs(raw) == expected
    (made,) = canonical_rows([RawRow("row", 1, raw)], kind=PREFERENCES, source=Source(files=["x"]), repair=())
    assert expected == ["tie"] or compact(made.row.prompt) == "U q"
    assert pairs(raw, margin=5) == [
        {"a>b": "a>b" if "score_A" in raw else "below_margin", "tie": "tie"}.get(expected[0], "below_margin")
    ]


def test_scores_must_agree_with_the_verdict_and_alone_are_votes_only_for_preferences():
    votes = {"prompt": "q", "response_a": "a", "response_b": "b", "score_a": 1, "score_b": 5}
    assert pairs(votes | {"winner": "a"}) == ["rating_contradicts"]
    assert pairs(votes | {"winner": "b"}) == ["b>a"]
    row = {"instruction": "q", "output": "r", "output_1": "x", "output_2": "y", "score_1": 1, "score_2": 2}
    assert read(row)[0] == "prompt-response"


def test_the_mean_of_several_votes():
    votes = {"prompt": "q", "response_1": "a", "response_2": "b"}
    assert [pairs(votes | {"preference": mean}) for mean in (1.33, 1.67, 1.5, 1.0)] == [
        ["a>b"],
        ["b>a"],
        ["tie"],
        ["a>b"],
    ]
