"""What the report says of a judge's win rates: cells, the verdict's measure, and findings."""

from types import SimpleNamespace

import pytest

from snaketune.evaluation.win_rates import win_rate
from snaketune.report.data.win_rates import JudgedComparison
from snaketune.report.judge.verdict import BETTER, INCONCLUSIVE, judged_difference
from snaketune.report.judge.win_rate_rules import judge_findings


def judged(
    verdicts: list[tuple[float | None, float | None]], tokens: tuple[int, int] = (20, 10), truncated: float = 0.0
):
    """A comparison with these verdicts on as many prompts, of responses of about so many tokens."""
    pairs = [
        {"first": first, "second": second, "tokens": tokens[0] + n % 3, "opponent_tokens": tokens[1]}
        for n, (first, second) in enumerate(verdicts)
    ]
    result = SimpleNamespace(name="all/dpo-new", manifest={"judge": {"name": "server", "model": "large"}})
    comparison = JudgedComparison(result=result, against="sft:old")
    comparison.__dict__["scores"] = win_rate(pairs) | {"truncated": truncated, "opponent_truncated": 0.0, "equal": 0}
    return comparison


def test_a_row_has_every_figure():
    comparison = judged([(1.0, 1.0)] * 30 + [(0.0, 0.0)] * 10)
    assert (comparison.model, comparison.evaluation, comparison.judge) == ("dpo:new", "all", "large")
    rate, _, outcomes, bias, inconsistent, unclear, tokens = comparison.row
    assert rate.startswith("75% [") and outcomes == "30 / 0 / 10" and bias.startswith("0% [")
    assert (inconsistent, unclear) == ("0%", "0%") and tokens.startswith("21")


def test_no_readable_verdict_is_shown_as_nothing():
    comparison = judged([(None, None)] * 3)
    assert comparison.row[:2] == ["–", "–"]
    assert [finding.kind for finding in judge_findings([comparison])] == ["unclear verdicts"]


@pytest.mark.parametrize(("wins", "outcome"), [(30, BETTER), (21, INCONCLUSIVE)])
def test_the_verdict_compares_the_win_rate_with_that_of_equal_models(wins, outcome):
    difference = judged_difference(judged([(1.0, 1.0)] * wins + [(0.0, 0.0)] * (40 - wins)), "")
    assert difference.outcome == outcome and difference.rows == 40
    assert difference.shown_before == "50% by chance" and difference.name == "win rate of responses, by large"


def test_findings_name_what_makes_a_judge_doubtful():
    first = [(1.0, 0.0)] * 20 + [(1.0, 1.0)] * 10
    kinds = {finding.kind for finding in judge_findings([judged(first), judged(first, truncated=0.5)])}
    assert kinds == {"position bias", "truncated responses"}
    unclear = judged([(None, 1.0)] * 10 + [(1.0, 1.0)] * 10)
    assert "unclear verdicts" in {finding.kind for finding in judge_findings([unclear])}
    # Wins only where it is much longer.
    by_length = judged([(1.0, 1.0)] * 14 + [(0.0, 0.0)] * 6)
    by_length.scores["length_controlled"] = 0.4
    assert "won by length" in {finding.kind for finding in judge_findings([by_length])}
