"""Intervals and outcomes against numbers calculated by hand; each case fails with a formula that differs in one term."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

from snaketune.evaluation.score_intervals import Z
from snaketune.publishing.measures import Measure
from snaketune.publishing.scored_models import ScoredModel
from snaketune.report.judge.headline import model_lineage
from snaketune.report.judge.verdict import Difference, Verdict, paired, paired_per_token, row_outcomes

MEASURE = Measure(path="conversations.chat.exact_match.share", on="chat", name="", unit="share", better=1, values={})


def rows(gained: int, lost: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Correctness before and after of rows of which so many changed."""
    number = np.arange(size)
    before = number >= gained
    return before, (number < gained) | (number >= gained + lost)


@pytest.mark.parametrize(("gained", "lost", "size"), [(0, 0, 10), (6, 0, 10), (12, 3, 40), (5, 5, 20), (30, 0, 30)])
def test_the_paired_interval_is_that_of_agresti_and_min(gained, lost, size):
    """Half a row is added to each of the four cells of the table of outcomes: two rows, of which one changed."""
    n, total, changed = size + 2, gained - lost, gained + lost + 1
    half = Z * math.sqrt(changed - total**2 / n) / n
    expected = max(-1.0, total / n - half), min(1.0, total / n + half)
    assert paired(*rows(gained, lost, size)) == pytest.approx(expected)


def test_documents_with_other_tokens_are_not_paired():
    before = {number: (2.0 * number, 4) for number in range(6)}
    after = {number: (1.0 * number, 4) for number in range(6)}
    low, high = paired_per_token(before, after)
    assert low < -2.5 / 4 < high
    assert paired_per_token(before, after | {3: (3.0, 5)}) is None


def difference(interval: tuple[float, float] | None, better: int = 1) -> Difference:
    measure = Measure(**(vars(MEASURE) | {"better": better}))
    return Difference(measure=measure, evaluation="main", before=0.0, after=0.0, rows=9, interval=interval)


@pytest.mark.parametrize(
    ("interval", "better", "outcome"),
    [
        ((0.1, 0.3), 1, "better"),
        ((0.1, 0.3), -1, "worse"),
        ((-0.3, -0.1), -1, "better"),
        ((-0.1, 0.2), 1, "inconclusive"),
        # Zero itself is possible.
        ((0.0, 0.2), 1, "inconclusive"),
        ((-0.2, 0.0), 1, "inconclusive"),
        (None, 1, "no interval"),
    ],
)
def test_the_outcome_follows_from_the_side_of_zero(interval, better, outcome):
    assert difference(interval, better).outcome == outcome


@pytest.mark.parametrize(
    ("intervals", "tone"),
    [
        (((0.1, 0.2), (0.1, 0.2)), "better"),
        (((-0.2, -0.1), (-0.1, 0.1)), "worse"),
        (((0.1, 0.2), (-0.2, -0.1)), "inconclusive"),
        (((-0.1, 0.1),), "inconclusive"),
    ],
)
def test_a_model_that_is_better_and_worse_is_neither(intervals, tone):
    differences = [difference(interval) for interval in intervals]
    assert Verdict(model="sft:a", against="base:a", differences=differences).tone == tone


class Column(list):
    def to_pylist(self) -> list:
        return [*self]

    def to_numpy(self) -> np.ndarray:
        return np.array(self)


def test_accuracy_per_token_divides_by_each_completions_own_length():
    """A long chosen completion is less likely as a whole and more likely per token."""
    pairs = {"chosen_logp": [-20.0, -2.0], "rejected_logp": [-9.0, -6.0], "chosen_tokens": [20, 1]}
    pairs |= {"rejected_tokens": [3, 6], "corpus": ["votes"] * 2, "id": ["long", "short"]}
    pairs |= {f"reference_{side}_logp": [math.nan] * 2 for side in ("chosen", "rejected")}
    scored = SimpleNamespace(responses=[], pairs={name: Column(values) for name, values in pairs.items()})
    assert row_outcomes(scored) == {
        "preferences.votes.logp_accuracy": {"long": 0.0, "short": 1.0},
        "preferences.votes.logp_accuracy_per_token": {"long": 1.0, "short": 0.0},
    }


@pytest.mark.parametrize(
    ("share", "loss", "best"),
    [
        ({"a": 0.4, "b": 0.5}, {"a": 1.0, "b": 2.0}, "b"),
        # Without checked answers, or with equally many right ones, the lower loss.
        ({"a": None, "b": None}, {"a": 1.0, "b": 2.0}, "a"),
        ({"a": 0.5, "b": 0.5}, {"a": 2.0, "b": 1.0}, "b"),
    ],
)
def test_the_best_model_has_the_highest_share_then_the_lowest_loss(share, loss, best):
    def scored(name: str) -> ScoredModel:
        scores = {"conversations": {"chat": {"exact_match": {"share": share[name]}, "held_out_loss": loss[name]}}}
        return ScoredModel(result=SimpleNamespace(name=f"main/sft-{name}"), scores=scores, responses=[])

    results = SimpleNamespace(of=lambda *_: [], first=lambda *_: None)
    assert model_lineage(results, [scored("a"), scored("b")]) == [f"sft:{best}"]


def test_the_best_model_is_one_that_no_other_was_trained_from():
    """Rounds from a first model, and preferences from it: the last round is better than both."""
    starts = {"sft:few": None, "sft:own-1": "sft:few", "sft:own-2": "sft:own-1", "dpo:pairs": "sft:few"}
    runs = {label: SimpleNamespace(label=label) for label in starts}
    results = SimpleNamespace(of=lambda *_: [*runs.values()], first=lambda run, _: run and runs.get(starts[run.label]))

    def lineage(**shares: float) -> list[str]:
        scored = [
            ScoredModel(
                result=SimpleNamespace(name=f"main/{label.replace(':', '-')}"),
                scores={"conversations": {"chat": {"exact_match": {"share": shares[label.partition(":")[2]]}}}},
                responses=[],
            )
            for label in starts
        ]
        return model_lineage(results, scored)

    shares = {"few": 0.4, "own-1": 0.9, "own-2": 0.8, "pairs": 0.5}
    assert lineage(**shares) == ["sft:few", "sft:own-1", "sft:own-2"]
    assert lineage(**shares | {"pairs": 0.8}) == ["sft:few", "dpo:pairs"]
