"""Exact match and preference accuracy on given answers and log-probabilities."""

import math

import numpy as np
import pyarrow as pa
import pytest

from snaketune.config.evaluations import ExactMatch
from snaketune.evaluation.exact_match import Prompt, choose_prompts, judge, same_answer, summarize
from snaketune.evaluation.held_out import PAIRS, pair_table, preference_scores, reference_logps
from snaketune.evaluation.pair_scores import by_source
from snaketune.evaluation.score_intervals import wilson
from snaketune.publishing.measures import PREFERENCES
from snaketune.training.reference.logps_table import Reference

# The row of a pair without a reference.
NONE = [math.nan, math.nan]
PROMPT = Prompt(id="1", corpus="c", task="sum", messages=[{"role": "user", "content": "2+2"}], answer="4")


@pytest.mark.parametrize(
    ("answer", "expected", "same"),
    [("4", "4", True), ("4.0", "4", True), ("$1,200", "1200", True), ("4", "5", False), ("NaN", "NaN", True),
     ("nan", "NaN", False), ("four", "4", False), ("", "", True), ("Infinity", "inf", False),
     # Commas are thousands separators only; underscores are Python's.
     ("12,345,678.50", "12345678.5", True), ("-1,234", "-1234.0", True), ("1,234.", "1234", True), ("72,", "72", True),
     ("3,5", "35", False), ("1,2,3", "123", False), ("1,2345", "12345", False), ("1234,567", "1234567", False),
     ("1,000.5,0", "1000.50", False), (",123", "123", False), ("1_000", "1000", False), ("3,5", "3,5", True)],
)  # fmt: skip
def test_answers_are_compared_as_text_and_as_numbers(answer, expected, same):
    assert same_answer(answer, expected) is same


def test_an_answer_counts_only_where_the_pattern_matches():
    spec = ExactMatch(answer_pattern=r"Answer: (.*)")
    assert judge(PROMPT, "Sure!\nAnswer: 4 \nBye", 9, spec).correct is True
    assert judge(PROMPT, "Answer: 44", 3, spec).correct is False
    missed = judge(PROMPT, "4", 1, spec)
    assert (missed.found, missed.correct) == (None, False)


def test_summary_counts_by_task_and_excludes_uncheckable_prompts():
    spec = ExactMatch()
    free = Prompt(id="2", corpus="c", task=None, messages=[], answer=None)
    summary = summarize([judge(PROMPT, "4", 2, spec), judge(PROMPT, "5", 4, spec), judge(free, "hi", 6, spec)])
    assert (summary["prompts"], summary["correct"], summary["share"]) == (2, 1, 0.5)
    interval = [0.0945, 0.9055]
    assert summary["share_interval"] == interval
    assert summary["by_task"] == {"sum": {"prompts": 2, "correct": 1, "share": 0.5, "share_interval": interval}}
    assert summary["mean_response_tokens"] == 4.0
    assert (summarize([])["share"], summarize([])["share_interval"]) == (None, None)


def test_every_model_gets_the_same_first_prompts_by_id():
    user, assistant = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
    rows = [
        {"id": str(n), "messages": [user, assistant], "answer": "a" if n % 2 else None, "task": None, "tools": None}
        for n in range(9)
    ]
    table = pa.Table.from_pylist(rows[::-1])
    chosen = choose_prompts("c", table, limit=2, samples=3)
    assert [prompt.id for prompt in chosen] == ["1", "3", "0"]
    assert chosen[0].messages == [user]


def table_of(sums_P2: np.ndarray, counts_P2: np.ndarray, reference_P2: np.ndarray) -> pa.Table:
    pairs = len(sums_P2)
    return pair_table("c", [str(n) for n in range(pairs)], [0] * pairs, sums_P2, counts_P2, reference_P2)


def test_preference_scores_with_and_without_a_reference():
    sums = np.array([[-1.0, -2.0], [-5.0, -3.0], [-4.0, -4.5]])
    counts = np.array([[1, 4], [5, 3], [4, 9]])
    reference = Reference(logps=(-7.0, -3.0), tokens=(5, 3))
    references = reference_logps(["a", "b", "c"], counts, {"b": reference})
    scores = preference_scores(table_of(sums, counts, references))
    assert scores["logp_accuracy"] == pytest.approx(2 / 3, abs=1e-4)
    # b: both completions are equally likely.
    assert scores["logp_accuracy_per_token"] == pytest.approx(1 / 6, abs=1e-4)
    # b: the chosen completion is less likely, but gained 2 nats on the reference, and the rejected one none.
    assert (scores["reward_accuracy"], scores["reward_margin_nats"], scores["pairs_with_reference"]) == (1.0, 2.0, 1)
    assert (scores["chosen_reward_nats"], scores["rejected_reward_nats"]) == (2.0, 0.0)
    assert scores["chosen_logp_nats"] == pytest.approx(-10 / 3, abs=1e-4)
    assert preference_scores(table_of(sums[:1], counts[:1], references[:1]))["reward_accuracy"] is None
    # Besides the counts: exactly the scores that the report can sort by, each with an interval.
    named = PREFERENCES.keys() - {"reward_margin", "chosen_reward", "rejected_reward", "calibration_error"}
    assert scores.keys() - {"pairs", "pairs_with_reference"} == named | {f"{name}_interval" for name in named}


def test_scores_of_pairs_have_intervals():
    sums = np.random.default_rng(0).normal(size=(50, 2)) + np.array([-3.0, -3.5])
    scores = preference_scores(table_of(sums, np.ones((50, 2), int), np.full((50, 2), math.nan)))
    margins = sums[:, 0] - sums[:, 1]
    # Student's t with 49 degrees of freedom.
    mean, half = margins.mean(), 2.0096 * margins.std(ddof=1) / 50**0.5
    assert scores["logp_margin_nats_interval"] == pytest.approx([mean - half, mean + half], abs=1e-4)
    assert scores["logp_accuracy_interval"] == pytest.approx(wilson(float((margins > 0).mean()), 50), abs=1e-4)
    # No pairs give no interval; a few give one of a share, but not of a mean.
    assert (scores["reward_accuracy_interval"], scores["reward_margin_nats_interval"]) == (None, None)
    few = preference_scores(table_of(sums[:4], np.ones((4, 2), int), np.full((4, 2), math.nan)))
    assert few["logp_margin_nats_interval"] is None and few["logp_margin_nats"] is not None
    assert few["logp_accuracy_interval"][1] - few["logp_accuracy_interval"][0] > 0.5


def test_a_tie_counts_half():
    """So a model equal to its reference has a reward accuracy of one half."""
    sums, counts = np.array([[-1.0, -2.0], [-5.0, -5.0]]), np.array([[4, 4], [5, 5]])
    scores = preference_scores(table_of(sums, counts, sums))
    assert (scores["reward_accuracy"], scores["reward_margin_nats"]) == (0.5, 0.0)
    assert (scores["logp_accuracy"], scores["logp_accuracy_per_token"]) == (0.75, 0.75)
    assert scores["reward_accuracy_interval"] == pytest.approx(wilson(0.5, 2), abs=1e-4)


def test_preference_scores_by_source_equal_those_of_its_pairs_alone():
    sums = np.array([[-1.0, -2.0], [-5.0, -3.0], [-4.0, -4.5]])
    counts = np.array([[1, 4], [5, 3], [4, 9]])
    known = np.array([NONE, [-7.0, -3.0], NONE])
    pairs = table_of(sums, counts, known)
    scores = by_source([2, 0, 2], lambda own_P: preference_scores(pairs.filter(own_P)))["by_source"]
    assert scores == {
        "0": preference_scores(table_of(sums[1:2], counts[1:2], known[1:2])),
        "2": preference_scores(table_of(sums[[0, 2]], counts[[0, 2]], np.array([NONE, NONE]))),
    }
    assert by_source([1, 1, 1], lambda own_P: {"pairs": 3}) == {}


def test_a_reference_over_different_tokens_gives_no_reward(capsys):
    """For instance, training truncated the pair and the evaluation doesn't."""
    counts = np.array([[5, 3], [9, 3]])
    reference = Reference(logps=(-7.0, -3.0), tokens=(5, 3))
    known = {"whole": reference, "cut": reference, "elsewhere": reference}
    logps = reference_logps(["whole", "cut", "unknown"], np.concatenate([counts, counts[:1]]), known)
    assert logps[0].tolist() == [-7.0, -3.0] and np.isnan(logps[1:]).all()
    assert "1 pairs were truncated differently" in capsys.readouterr().out


def test_the_pair_table_has_the_reference_where_there_is_one():
    sums, counts = np.array([[-1.0, -2.0], [-5.0, -3.0]]), np.array([[1, 4], [5, 3]])
    known = np.array([NONE, [-7.0, -3.0]])
    table = pair_table("c", ["a", "b"], [0, 2], sums, counts, known)
    assert table.schema == PAIRS
    assert table.to_pylist()[1] == {
        "corpus": "c", "id": "b", "source": 2, "chosen_logp": -5.0, "rejected_logp": -3.0,
        "chosen_tokens": 5, "rejected_tokens": 3, "reference_chosen_logp": -7.0, "reference_rejected_logp": -3.0,
    }  # fmt: skip
    assert table.to_pylist()[0]["reference_chosen_logp"] is None
    assert pair_table("c", [], [], sums[:0], counts[:0], known[:0]).num_rows == 0
