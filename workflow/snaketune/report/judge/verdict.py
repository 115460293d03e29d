"""Compare two models on the same held-out rows, measure by measure, with a 95 % interval for each difference.

Intervals are in closed form, hence deterministic. Rows that both models answered are paired: only rows that one gets right and
the other wrong are informative, and the interval is about half as wide as for two independent shares. Held-out loss is paired
by document. Measures without results per row (tasks of lm-evaluation-harness) have a difference but no interval, and don't
count in the verdict.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from snaketune.evaluation.pair_scores import margins, wins
from snaketune.evaluation.score_intervals import Z, per_token
from snaketune.publishing.measures import FORMATS, Measure, measures
from snaketune.publishing.scored_models import ScoredModel
from snaketune.report.data.results import ResultSet
from snaketune.report.data.win_rates import JudgedComparison, judged_comparisons

Interval = tuple[float, float]
# Identifies a document: the digest of its pack, and its number there.
Document = TypeVar("Document")

BETTER, WORSE, INCONCLUSIVE, NO_INTERVAL = "better", "worse", "inconclusive", "no interval"
POINTS = " points"
LOSS = ".held_out_loss"
# By how many of the pairs chance prefers the chosen completion, as a model does whose reference is itself.
CHANCE = 0.5
# Perplexity repeats the loss, and summed log-probabilities favour short completions with any model.
EXCLUDED = ("perplexity", "logp_accuracy")


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The difference of two models in one measure.

    Attributes:
        rows: Number of paired rows; 0 if rows can't be paired.
        interval: The interval of `after - before`; None if unknown.
        by_chance: Whether `before` is chance: a reward compares the model with its reference, so the other one has none.
    """

    measure: Measure
    evaluation: str
    before: float
    after: float
    rows: int
    interval: Interval | None
    by_chance: bool = False

    @property
    def value(self) -> float:
        return self.after - self.before

    @property
    def outcome(self) -> str:
        """`better`, `worse`, `inconclusive` if the interval contains zero, or `no interval`."""
        if self.interval is None:
            return NO_INTERVAL
        low, high = sorted(self.measure.better * bound for bound in self.interval)
        return BETTER if low > 0 else WORSE if high < 0 else INCONCLUSIVE

    @property
    def name(self) -> str:
        return f"{self.measure.name} of {self.measure.on}"

    def shown(self, value: float) -> str:
        return FORMATS[self.measure.unit](value)

    @property
    def shown_before(self) -> str:
        return f"{self.shown(CHANCE)} by chance" if self.by_chance else self.shown(self.before)

    @property
    def text(self) -> str:
        """The difference as text: shares in percentage points, other measures in their unit."""
        return signed(self.value, self.measure.unit)

    @property
    def interval_text(self) -> str:
        bounds = (signed(bound, self.measure.unit).removesuffix(POINTS) for bound in self.interval or ())
        return " to ".join(bounds)

    def positions(self, scale: float) -> tuple[float, float, float]:
        """Low, difference and high for drawing: from minus to plus `scale` is 0 to 100, by the square root of the distance
        from zero, so that a narrow interval is still seen beside a wide or distant one."""
        low, high = self.interval or (self.value, self.value)
        return tuple(50 + math.copysign(50 * math.sqrt(abs(value) / scale), value) for value in (low, self.value, high))


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A model compared with one that it was trained from (`against`).

    Attributes:
        key: The config key that defines the model, if it was trained here.
    """

    model: str
    against: str
    key: str = ""
    differences: list[Difference]

    def of(self, outcome: str) -> list[Difference]:
        return [difference for difference in self.differences if difference.outcome == outcome]

    @property
    def tone(self) -> str:
        """`better`, `worse`, or `inconclusive` if it is neither or both."""
        won, lost = bool(self.of(BETTER)), bool(self.of(WORSE))
        return INCONCLUSIVE if won == lost else BETTER if won else WORSE

    @property
    def sentence(self) -> str:
        counts = (len(self.of(outcome)) for outcome in (BETTER, WORSE, INCONCLUSIVE))
        if self.differences and len(self.of(NO_INTERVAL)) < len(self.differences):
            return sentence(self.model, self.against, *counts)
        moved = "; ".join(
            f"{difference.name} {difference.shown_before} → {difference.shown(difference.after)}"
            for difference in self.differences
        )
        pair = f"{self.model} against {self.against}"
        return f"{pair}: {moved or 'no common measure'}; without intervals, significance is unknown."


def sentence(model: str, against: str, better: int, worse: int, inconclusive: int) -> str:
    """The verdict from the numbers of measures that are better, worse and inconclusive.

    >>> sentence("dpo:a", "base:a", 3, 0, 1)
    'dpo:a is better than base:a on 3 of 4 measures; 1 is inconclusive.'
    >>> sentence("dpo:a", "base:a", 2, 1, 0)
    'dpo:a is better than base:a on 2 of 3 measures and worse on 1.'
    >>> sentence("dpo:a", "base:a", 0, 2, 0)
    'dpo:a is worse than base:a on both measures.'
    >>> sentence("dpo:a", "base:a", 0, 0, 2)
    'No significant difference between dpo:a and base:a: both measures are inconclusive.'
    """
    number = better + worse + inconclusive
    every = {1: "the only measure", 2: "both measures"}.get(number, f"all {number} measures")
    if not better and not worse:
        are = "are" if number > 1 else "is"
        return f"No significant difference between {model} and {against}: {every} {are} inconclusive."
    first, second = ("better", "worse") if better >= worse else ("worse", "better")
    more, less = max(better, worse), min(better, worse)
    text = f"{model} is {first} than {against} on {every if more == number else f'{more} of {number} measures'}"
    text += f" and {second} on {less}" if less else ""
    return text + (f"; {inconclusive} {'are' if inconclusive > 1 else 'is'} inconclusive." if inconclusive else ".")


def lineage_verdicts(results: ResultSet, lineage: list[str]) -> list[Verdict]:
    """Verdicts on the last model of a lineage against the first, and against the second to last if that is another.

    Args:
        lineage: Labels, the base first.
    """
    if len(lineage) < 2:
        return []
    model = lineage[-1]
    key = next((run.key for run in results.of("sft", "dpo") if run.label == model), "")
    verdicts = []
    judged = [comparison for comparison in judged_comparisons(results) if comparison.model == model]
    for against in dict.fromkeys((lineage[0], lineage[-2], *(comparison.against for comparison in judged))):
        scored = [{entry.model: entry for entry in models} for models in results.evaluations.values()]
        both = [(models[against], models[model]) for models in scored if against in models and model in models]
        # With several evaluations, measures are named with theirs.
        where = " ({})" if len(both) > 1 else ""
        found = [difference for pair in both for difference in differences(*pair, where.format(pair[0].evaluation))]
        # Win rates first: they measure whole responses.
        of_judges = [one for one in judged if one.against == against and one.scores["judged"]]
        found = [judged_difference(one, where.format(one.evaluation)) for one in of_judges] + found
        verdicts.append(Verdict(model=model, against=against, key=key, differences=found))
    return verdicts


def judged_difference(comparison: JudgedComparison, where: str) -> Difference:
    """The win rate, as a difference to that of two equal models. Args: where: as in `differences`."""
    scores, model, against = comparison.scores, comparison.model, comparison.against
    value, bounds = scores["win_rate"], scores["win_rate_interval"]
    measure = Measure(
        path=f"compare.{comparison.result.name}.win_rate",
        on=f"responses, by {comparison.judge}{where}",
        name="win rate",
        unit="share",
        better=1,
        values={model: value, against: CHANCE},
    )
    interval = (bounds[0] - CHANCE, bounds[1] - CHANCE) if bounds else None
    about = {"measure": measure, "evaluation": comparison.evaluation, "rows": scores["judged"], "interval": interval}
    return Difference(before=CHANCE, after=value, by_chance=True, **about)


def differences(before: ScoredModel, after: ScoredModel, where: str = "") -> list[Difference]:
    """Differences in every measure with a direction, those of rewards to chance where only `after` has any. `where` is a suffix
    for the names of corpora and tasks."""
    rows = [row_outcomes(scored) for scored in (before, after)]
    found = []
    for measure in measures([before, after], where):
        values, last = [measure.values[scored.model] for scored in (before, after)], measure.path.rpartition(".")[2]
        was, now = (of_model.get(measure.path, {}) for of_model in rows)
        by_chance = last == "reward_accuracy" and values[0] is None
        if by_chance:
            values[0], was = CHANCE, dict.fromkeys(now, CHANCE)
        if measure.detail or not measure.better or None in values or last in EXCLUDED:
            continue
        both = sorted(was.keys() & now.keys())
        interval = None
        section, _, name = measure.path.partition(".")
        if name.endswith(LOSS) and section == "conversations":
            documents = [scored.losses.get(name.removesuffix(LOSS), {}) for scored in (before, after)]
            both, interval = documents[0].keys() & documents[1].keys(), paired_per_token(*documents)
        elif both:
            was_N, now_N = (np.array([of_row[row] for row in both]) for of_row in (was, now))
            # Values over the paired rows; equal to the scores if both models have the same rows.
            # Rounded as the scores are.
            values = [round(float(outcomes_N.mean()), 4) for outcomes_N in (was_N, now_N)]
            low, high = paired(was_N, now_N)
            interval = (max(low, -CHANCE), min(high, 1 - CHANCE)) if by_chance else (low, high)
        about = {"measure": measure, "evaluation": after.evaluation, "rows": len(both), "interval": interval}
        about["by_chance"] = by_chance
        found.append(Difference(before=values[0], after=values[1], **about))
    return found


def interval_scales(found: Iterable[Difference]) -> dict[str, float]:
    """By unit, the end of the scale to which all of its intervals are drawn: the least of 0.1, 0.2, 0.4, 1, 2, 4, 10 ... that
    no bound exceeds."""
    furthest: dict[str, float] = {}
    for one in found:
        if one.interval:
            furthest[one.measure.unit] = max(furthest.get(one.measure.unit, 0.0), *map(abs, one.interval))
    return {unit: _rounded_up(bound) for unit, bound in furthest.items()}


def _rounded_up(bound: float) -> float:
    """
    >>> [_rounded_up(bound) for bound in (0.93, 0.31, 0.12, 3.0, 0.0)]
    [1.0, 0.4, 0.2, 4.0, 1.0]
    """
    power = 10.0 ** math.floor(math.log10(bound)) if bound else 1.0
    return next(round(step * power, 12) for step in (1, 2, 4, 10) if step * power >= bound)


def row_outcomes(scored: ScoredModel) -> dict[str, dict[str, float]]:
    """Correctness of each row (1, 0, or 0.5 for a tie): path of the measure → row id → value.

    Prompts count by exact match; pairs by each accuracy.
    """
    correct: dict[str, dict[str, float]] = {}
    for row in scored.responses:
        if row["correct"] is not None:
            path = f"conversations.{row['corpus']}.exact_match.share"
            correct.setdefault(path, {})[row["id"]] = float(row["correct"])
    pairs = scored.pairs
    for name, margin_P in margins(pairs).items():
        for corpus, pair, win in zip(pairs["corpus"].to_pylist(), pairs["id"].to_pylist(), wins(margin_P).tolist()):
            # NaN for pairs that the reference doesn't have.
            if name != "reward_accuracy" or math.isfinite(win):
                correct.setdefault(f"preferences.{corpus}.{name}", {})[pair] = win
    return correct


def signed(value: float, unit: str) -> str:
    """A number with its sign; shares in percentage points.

    >>> signed(0.125, "share"), signed(-0.3333, "share"), signed(-1.25, "nats"), signed(-7e-5, "nats")
    ('+12.5 points', '−33.3 points', '−1.25', '−0.0001')
    """
    sign = "+" if value > 0 else "−" if value < 0 else ""
    if unit == "share":
        number = f"{100 * abs(value):.1f}".removesuffix(".0")
        return f"{sign if float(number) else ''}{number}{POINTS}"
    if unit == "nats":
        number = f"{abs(value):.4f}".rstrip("0").rstrip(".")
        return f"{sign if float(number) else ''}{number}"
    return sign + FORMATS[unit](abs(value))


def paired(before_N: np.ndarray, after_N: np.ndarray) -> Interval:
    """The interval of the share of correct rows after, less before, on the same rows: bool[N] each, or float[N] with halves.

    As in McNemar's test, only rows that changed are informative. Half a row is added to each kind of change (Agresti and Min,
    2005), which keeps the interval sensible if few or no rows changed.

    >>> was, now = np.array([False] * 8 + [True] * 2), np.array([True] * 6 + [False] * 2 + [True] * 2)
    >>> [round(bound, 2) for bound in paired(was, now)], [round(bound, 2) for bound in paired(was, was)]
    ([0.17, 0.83], [-0.16, 0.16])
    """
    moved_N = after_N.astype(float) - before_N.astype(float)
    rows, total, squares = len(moved_N) + 2, float(moved_N.sum()), float((moved_N**2).sum()) + 1
    middle = total / rows
    half = Z * math.sqrt(max(squares - total**2 / rows, 0.0)) / rows
    return max(-1.0, middle - half), min(1.0, middle + half)


def paired_per_token(
    before: Mapping[Document, tuple[float, int]], after: Mapping[Document, tuple[float, int]]
) -> Interval | None:
    """The interval of the mean per token after, less before, over common documents; None for fewer than five.

    Args:
        before, after: By document, a sum and its number of tokens; None is returned if the tokens differ.

    >>> one = {n: (float(n), 2) for n in range(1, 7)}
    >>> twice = {n: (2 * total, tokens) for n, (total, tokens) in one.items()}
    >>> [round(bound, 2) for bound in paired_per_token(one, twice)], paired_per_token(one, {})
    ([0.77, 2.73], None)
    """
    both = sorted(before.keys() & after.keys())
    tokens = [after[document][1] for document in both]
    if not both or tokens != [before[document][1] for document in both]:
        return None
    mean, half = per_token([after[document][0] - before[document][0] for document in both], tokens)
    return None if half is None else (mean - half, mean + half)
