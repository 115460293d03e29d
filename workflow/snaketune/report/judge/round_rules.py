"""Findings about rounds: whether a model learns, or games its scorer."""

from collections.abc import Iterator

from snaketune.report.data.rounds import HeldOutScores, Interval, Rounds, Sampled
from snaketune.report.judge.findings import ReportFinding
from snaketune.text import percent

# Ratio of mean lengths from which responses have grown.
GROWN = 1.3


def round_findings(chains: list[Rounds]) -> Iterator[ReportFinding]:
    for chain in chains:
        samples = [one.sampled for one in chain.rounds if one.sampled]
        for scores in chain.held_out:
            yield from _longer(chain, scores)
            if len(samples) > 1:
                yield from _parted(chain, scores, samples)
        if len(samples) > 1 and not any(scores.exact for scores in chain.held_out):
            yield from _longer_samples(chain, samples)


def _longer(chain: Rounds, scores: HeldOutScores) -> Iterator[ReportFinding]:
    first, last = min(scores.tokens, default=0), max(scores.tokens, default=0)
    if first == last or not {first, last} <= scores.exact.keys():
        return
    (before, _), (after, bounds) = scores.exact[first], scores.exact[last]
    if scores.tokens[last] >= GROWN * scores.tokens[first] and not _is_above(bounds, before):
        yield _grown(
            chain,
            f"over {last - first} rounds, responses to {scores.corpus} grew from {scores.tokens[first]:.3g} to "
            f"{scores.tokens[last]:.3g} tokens on average, and exact match didn't: {percent(before)}, then {percent(after)}",
        )


def _longer_samples(chain: Rounds, samples: list[Sampled]) -> Iterator[ReportFinding]:
    """The same by the scores of the rounds themselves, where nothing was evaluated."""
    first, last = samples[0], samples[-1]
    if last.tokens >= GROWN * first.tokens and not _is_above(last.mean_interval, first.mean):
        yield _grown(
            chain,
            f"sampled responses grew from {first.tokens:.3g} to {last.tokens:.3g} tokens on average, and their score didn't: "
            f"{first.mean:.3g}, then {last.mean:.3g}",
        )


def _grown(chain: Rounds, message: str) -> ReportFinding:
    return ReportFinding(
        kind="longer responses",
        where=chain.name,
        message=message,
        action="score length too, or use a loss that discounts it (simpo, or ld_alpha)",
        key=f"{chain.key}.score",
    )


def _parted(chain: Rounds, scores: HeldOutScores, samples: list[Sampled]) -> Iterator[ReportFinding]:
    """The score that is trained on grows, and that of checked answers falls."""
    first, last = samples[0], samples[-1]
    if first.checked or len(scores.exact) < 2:
        return
    (before, was), (after, now) = scores.exact[min(scores.exact)], scores.exact[max(scores.exact)]
    fell = after < before and was is not None and now is not None and now[1] < before
    if _is_above(last.mean_interval, first.mean) and fell:
        yield ReportFinding(
            kind="scores part",
            where=chain.name,
            message=f"the score that the rounds train on grew from {first.mean:.3g} to {last.mean:.3g}, and checked answers to "
            f"{scores.corpus} became fewer: {percent(before)}, then {percent(after)}. The model may have learnt to please its "
            "scorer",
            action="add the checked answer to the score, or end with an earlier round",
            key=f"{chain.key}.score",
        )


def _is_above(bounds: Interval, value: float) -> bool:
    """Whether an interval lies above a value."""
    return bounds is not None and bounds[0] > value
