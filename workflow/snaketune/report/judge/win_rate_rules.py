"""Findings about judges and what they compared."""

from collections.abc import Iterator

from snaketune.report.data.win_rates import JudgedComparison
from snaketune.report.judge.findings import NOTES, ReportFinding
from snaketune.report.judge.sampling_rules import TRUNCATED
from snaketune.text import percent

# Shares of verdicts from which a judge is reported.
BIASED, UNCLEAR = 0.2, 0.1


def judge_findings(judged: list[JudgedComparison]) -> Iterator[ReportFinding]:
    """Judges that prefer a position, can't be read, or prefer lengths; and responses that were truncated."""
    for comparison in judged:
        scores, where = comparison.scores, f"{comparison.model} against {comparison.against}"
        key = f"eval.{comparison.evaluation}.judge"
        bias, bounds = scores["position_bias"], scores["position_bias_interval"]
        if bias is not None and abs(bias) >= BIASED and bounds and (bounds[0] > 0 or bounds[1] < 0):
            position = "first" if bias > 0 else "second"
            yield ReportFinding(
                kind="position bias",
                where=where,
                message=f"the judge prefers the response shown {position}: by {percent(abs(bias))} of its verdicts. Both "
                "orders were asked for, so this cancels out, but fewer verdicts tell the models apart",
                action="ask a larger judge, or write a rubric that says more",
                key=key,
                severity=NOTES,
            )
        if (scores["unclear"] or 0) >= UNCLEAR:
            yield ReportFinding(
                kind="unclear verdicts",
                where=where,
                message=f"{percent(scores['unclear'])} of the judge's replies name no verdict",
                action="raise max_new_tokens if they are truncated (verdicts.arrow has them), or ask another judge",
                key=f"{key}.max_new_tokens",
                gain=scores["unclear"],
            )
        rate, controlled = scores["win_rate"], scores["length_controlled"]
        if rate is not None and controlled is not None and (rate - 0.5) * (controlled - 0.5) < 0:
            yield ReportFinding(
                kind="won by length",
                where=where,
                message=f"a win rate of {percent(rate)} would be {percent(controlled)} at equal lengths "
                f"({scores['mean_tokens']:.3g} against {scores['opponent_mean_tokens']:.3g} tokens)",
                action="say in the rubric that length is no merit, or train with a loss that discounts it (simpo, or ld_alpha)",
                key=f"{key}.rubric",
                severity=NOTES,
            )
        truncated = max(scores["truncated"], scores["opponent_truncated"])
        if truncated >= TRUNCATED:
            yield ReportFinding(
                kind="truncated responses",
                where=where,
                message=f"the judge compared responses of which {percent(truncated)} were truncated",
                action="raise it, so that whole responses are compared",
                key=f"eval.{comparison.evaluation}.generation.max_new_tokens",
                gain=truncated,
            )
